"""Train on made-up batches: a whole run of the trainer without an orchestrator."""

import json

import pytest

from trivet.checkpoints.commit import committed_steps
from trivet.config.layout import RunLayout
from trivet.config.schema.trainer import FakeBatchesConfig, TrainerConfig, TrainerDataConfig, TrainerModelConfig
from trivet.errors import ConfigError
from trivet.trainer.loop import check_batch, run
from trivet.trainer.main import open_receiver
from trivet.trainer.measurement.fake_batches import FakeReceiver
from trivet.weights.catalog import published_versions
from trivet.wire.batches import BatchPurpose
from trivet.wire.codec import encode
from trivet.wire.versions import Step


def make_config(tiny_model, **fake) -> TrainerConfig:
    return TrainerConfig(
        model=TrainerModelConfig(name=str(tiny_model), seq_len=32, compute_dtype="float32"),
        data=TrainerDataConfig(fake=FakeBatchesConfig(**fake)),
    )


def test_a_batch_is_a_function_of_its_step(tiny_model):
    config = make_config(tiny_model, batch_size=3)
    first, again = (FakeReceiver(config, from_step=Step(0)) for _ in range(2))
    assert first.receive(Step(0)).purpose is BatchPurpose.PROBE
    batch = first.receive(Step(1))
    check_batch(batch, seq_len=32, vocab_size=FakeReceiver(config, from_step=Step(0))._vocab_size)
    assert (batch.num_tokens, batch.num_rollouts) == (96, 3)
    assert encode(batch) == encode(again.receive(Step(1)))
    assert encode(batch) != encode(first.receive(Step(2)))


def test_rows_may_hold_samples_of_many_lengths(tiny_model):
    batch = FakeReceiver(make_config(tiny_model, batch_size=8, generate_samples=True), from_step=Step(0)).receive(Step(1))
    assert batch.num_tokens == 8 * 32
    assert batch.num_rollouts > 8


def test_the_trainer_runs_by_itself_and_publishes_and_commits(tiny_model, world, tmp_path):
    config = make_config(tiny_model).model_copy(update={"output_dir": tmp_path, "max_steps": 2})
    run(config, world, make_receiver=lambda from_step: open_receiver(config, from_step, world))
    layout = RunLayout(tmp_path)
    assert committed_steps(layout) == [2]
    assert 2 in published_versions(layout)
    lines = [json.loads(line) for line in (layout.metrics / "trainer.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]


def test_a_model_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        FakeReceiver(make_config(tmp_path), from_step=Step(0))
