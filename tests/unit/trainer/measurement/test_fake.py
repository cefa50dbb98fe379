import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.checkpoints.commit import committed_steps
from trivet.config.layout import RunLayout
from trivet.config.schema.trainer import FakeBatchesConfig, TrainerConfig, TrainerDataConfig, TrainerModelConfig
from trivet.errors import ConfigError
from trivet.trainer.loop import check_batch, run
from trivet.trainer.main import open_receiver
from trivet.trainer.measurement.fake import fake_item, fake_rows, fake_rows_of_many_lengths
from trivet.weights.catalog import published_versions
from trivet.wire.batches import BatchPurpose
from trivet.wire.codec import encode
from trivet.wire.versions import Step


@given(st.integers(2, 40), st.sampled_from([fake_rows, fake_rows_of_many_lengths]), st.integers(1, 9))
def test_rows_are_full_and_as_many_as_asked_for(seq_len: int, make, num_rows: int) -> None:
    rows = make(1, seed=0, seq_len=seq_len, vocab_size=7, num_rows=num_rows)
    assert [row.num_tokens for row in rows] == [seq_len] * num_rows
    for row in rows:
        assert row.sequence_lengths_S.min() >= 2
        assert row.loss_mask_T.sum() == seq_len - len(row.sequence_lengths_S)
        assert 0 <= row.token_ids_T.min() <= row.token_ids_T.max() < 7


def test_a_step_is_the_same_again_and_another_is_not() -> None:
    first, again, other = (fake_rows(step, seed=3, seq_len=16, vocab_size=1000) for step in (5, 5, 6))
    assert np.array_equal(first[1].token_ids_T, again[1].token_ids_T)
    assert not np.array_equal(first[1].token_ids_T, other[1].token_ids_T)
    assert not np.array_equal(first[0].token_ids_T, first[1].token_ids_T)


def test_samples_of_a_group_share_a_prompt_that_is_not_trained_on() -> None:
    rows = fake_rows(1, seed=0, seq_len=10, vocab_size=1000, num_rows=3, prompt_len=2, answer_len=3, group_size=3)
    samples_ST = np.stack([row.token_ids_T.reshape(2, 5) for row in rows]).reshape(6, 5)
    prompts = {tuple(sample_T[:2]) for sample_T in samples_ST}
    answers = {tuple(sample_T[2:]) for sample_T in samples_ST}
    assert (len(prompts), len(answers)) == (2, 6)
    for row in rows:
        assert row.loss_mask_T.reshape(2, 5).tolist() == [[False, False, True, True, True]] * 2


def test_increasing_ids_count_up_within_the_vocabulary() -> None:
    item = fake_item(0, seed=0, seq_len=6, vocab_size=4, token_ids="increasing")
    assert item.sample.token_ids_T.tolist() == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize(("length", "expected"), [("fixed", {9}), ("variable", set(range(2, 10)))])
def test_items_have_the_lengths_asked_for(length, expected: set[int]) -> None:
    items = [fake_item(index, seed=0, seq_len=9, vocab_size=5, length=length) for index in range(200)]
    assert {item.sample.num_tokens for item in items} == expected
    assert all(item.sample.num_loss_tokens == item.sample.num_tokens - 1 for item in items)


def make_config(tiny_model, **fake) -> TrainerConfig:
    return TrainerConfig(
        model=TrainerModelConfig(name=str(tiny_model), seq_len=32, compute_dtype="float32"),
        data=TrainerDataConfig(fake=FakeBatchesConfig(**fake)),
    )


def test_a_batch_is_a_function_of_its_step(tiny_model: Path, world):
    config = make_config(tiny_model, batch_size=3)
    first, again = (open_receiver(config, Step(0), world) for _ in range(2))
    assert first.receive(Step(0)).purpose is BatchPurpose.PROBE
    batch = first.receive(Step(1))
    check_batch(batch, seq_len=32, vocab_size=first.vocab_size)
    assert (batch.num_tokens, batch.num_rollouts) == (96, 3)
    assert encode(batch) == encode(again.receive(Step(1)))
    assert encode(batch) != encode(first.receive(Step(2)))


def test_rows_may_hold_samples_of_many_lengths(tiny_model: Path, world):
    batch = open_receiver(make_config(tiny_model, batch_size=8, generate_samples=True), Step(0), world).receive(Step(1))
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


def test_a_model_that_is_not_there_is_named(tmp_path: Path, world):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        open_receiver(make_config(tmp_path), Step(0), world)
