import json
import math
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from trivet.checkpoints.commit import committed_steps
from trivet.checkpoints.resume import adopt
from trivet.config.layout import RunLayout
from trivet.config.schema.sft import SftConfig
from trivet.errors import BatchError, ConfigError, Diverged, ResumeError
from trivet.trainer.sft.main import run
from trivet.trainer.step import Learner, StepResult, train_step
from trivet.weights.catalog import published_versions
from trivet.weights.manifest import verify
from trivet.wire.batches import MicroBatch
from trivet.wire.versions import Step


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    words = ["abcd", "hello", "stone", "river", "tiny", "words", "every", "night", "green", "house"]
    path.write_text("".join(json.dumps({"prompt": word, "completion": word[::-1]}) + "\n" for word in words))
    return path


def make_config(model_dir: Path, data_file: Path, output_dir: Path, **changes: object) -> SftConfig:
    values = {
        "output_dir": output_dir,
        "model": {"name": str(model_dir), "compute_dtype": "float32", "seq_len": 64},
        "optim": {"lr": 3e-3},
        "data": {"name": str(data_file), "batch_size": 4},
    }
    return SftConfig.model_validate(values | changes)


def metrics_of(layout: RunLayout) -> list[dict[str, float]]:
    return [json.loads(line) for line in (layout.metrics / "sft.jsonl").read_text().splitlines()]


def test_loss_falls_and_the_last_weights_are_published(tiny_model: Path, data: Path, world, tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / "out")
    run(make_config(tiny_model, data, layout.root, max_steps=20), world)
    losses = [line["loss/mean"] for line in metrics_of(layout)]
    assert losses[-1] < 0.6 * losses[0]
    assert published_versions(layout) == committed_steps(layout) == [20]


@pytest.fixture
def picture_model(tiny_model: Path, tmp_path: Path) -> Path:
    """A model of 128 tokens whose tokenizer has a stand-in for pictures behind them."""
    directory = tmp_path / "picture"
    shutil.copytree(tiny_model, directory)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_tokens([f"<extra_{number}>" for number in range(129 - len(tokenizer))])
    tokenizer.save_pretrained(directory)
    config = directory / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"image_token": tokenizer.convert_ids_to_tokens(128)}))
    return directory


def test_only_a_conversation_with_a_picture_is_refused_by_a_model_without_its_row(
    picture_model: Path, data: Path, world, tmp_path: Path
) -> None:
    run(make_config(picture_model, data, tmp_path / "without", max_steps=1), world)
    with_picture = tmp_path / "picture.jsonl"
    (token,) = AutoTokenizer.from_pretrained(picture_model).convert_ids_to_tokens([128])
    with_picture.write_text(json.dumps({"prompt": f"a{token}", "completion": "b"}) + "\n")
    with pytest.raises(
        BatchError, match=r"of data, at step 1, holds token 128, and the embedding of model\.name has 128 tokens"
    ):
        run(make_config(picture_model, with_picture, tmp_path / "with", max_steps=1), world)
    val = {"data": {"name": str(with_picture)}}
    with pytest.raises(BatchError, match=r"of val\.data holds token 128"):
        run(make_config(picture_model, data, tmp_path / "val", max_steps=1, val=val), world)


def test_a_tokenizer_with_more_tokens_than_rows_is_refused(picture_model: Path, data: Path, world, tmp_path: Path) -> None:
    """The names of the hub are such models: nothing checks them before."""
    config = picture_model / "tokenizer_config.json"
    config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != "image_token"}))
    with pytest.raises(
        ConfigError, match=r"has an embedding of 128 tokens, and the tokenizer \(.*\) has 129: 1 tokens have no row"
    ):
        run(make_config(picture_model, data, tmp_path / "out", max_steps=1), world)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_the_step_end_and_commits_it(
    tiny_model: Path, data: Path, world, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def signalled(learner: Learner, rows: Sequence[MicroBatch], *, step: Step) -> StepResult:
        if step == 3:
            os.kill(os.getpid(), number)
        return train_step(learner, rows, step=step)

    monkeypatch.setattr("trivet.trainer.sft.main.train_step", signalled)
    layout = RunLayout(tmp_path / "out")
    assert run(make_config(tiny_model, data, layout.root, max_steps=7), world) == 128 + number
    assert published_versions(layout) == committed_steps(layout) == [3]
    assert run(make_config(tiny_model, data, layout.root, max_steps=7, ckpt={"resume_step": 3}), world) == 0
    assert committed_steps(layout) == [3, 7]


def test_a_run_that_is_resumed_with_more_steps_does_not_stretch_its_schedule(
    tiny_model: Path, data: Path, world, tmp_path: Path
) -> None:
    layout = RunLayout(tmp_path / "out")
    cosine = {"scheduler": {"type": "cosine", "warmup_steps": 1, "min_lr": 1e-4}, "ckpt": {"resume_step": -1, "interval": 1}}
    run(make_config(tiny_model, data, layout.root, max_steps=3, **cosine | {"ckpt": {"interval": 1}}), world)
    run(make_config(tiny_model, data, layout.root, max_steps=5, **cosine), world)
    run(make_config(tiny_model, data, layout.root, max_steps=6, **cosine), world)
    rates = [line["optim/lr"] for line in metrics_of(layout)]
    assert rates == pytest.approx([3e-3, 1.55e-3, 1e-4, 1e-4, 1e-4, 1e-4])


@pytest.mark.parametrize("name", ["data", "val.data"])
def test_a_run_that_is_resumed_on_other_data_says_so_or_refuses(
    tiny_model: Path, data: Path, world, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    layout, held_out = RunLayout(tmp_path / "out"), tmp_path / "val.jsonl"
    held_out.write_text(data.read_text())
    val = {"val": {"data": {"name": str(held_out)}}}
    run(make_config(tiny_model, data, layout.root, max_steps=1, **val), world)
    run(make_config(tiny_model, data, layout.root, max_steps=2, ckpt={"resume_step": -1}, **val), world)
    assert "the data are not those" not in caplog.text
    changed = data if name == "data" else held_out
    changed.write_text(changed.read_text().replace("hello", "hallo"))
    resumed = {"max_steps": 3, "ckpt": {"resume_step": 2}, **val}
    with pytest.raises(ResumeError, match=f"^{name}: the data are not those of checkpoint step_2"):
        run(make_config(tiny_model, data, layout.root, strict_data=True, **resumed), world)
    run(make_config(tiny_model, data, layout.root, **resumed), world)
    assert f"{name}: the data are not those of checkpoint step_2" in caplog.text


def test_a_step_that_diverges_names_the_last_good_weights(tiny_model: Path, data: Path, world, tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / "out")
    with pytest.raises(Diverged, match=r"of step 2 is nan .* Lower optim\.lr, .*the last good weights are .*step_1$"):
        run(make_config(tiny_model, data, layout.root, max_steps=3, optim={"lr": 1e30}, ckpt={"interval": 1}), world)
    assert published_versions(layout) == [1]


def test_cut_conversations_are_counted(tiny_model: Path, data: Path, world, tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / "out")
    short = {"name": str(tiny_model), "compute_dtype": "float32", "seq_len": 12}
    run(make_config(tiny_model, data, layout.root, model=short, max_steps=1), world)
    assert metrics_of(layout)[0]["data/num_truncated"] > 0


def test_data_that_is_begun_anew_stays_so_over_further_resumes(tiny_model: Path, data: Path, world, tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / "out")
    run(make_config(tiny_model, data, layout.root, max_steps=2, ckpt={"interval": 1}), world)
    anew = {"resume_step": 1, "skip_dataloader": True, "skip_progress": True, "interval": 1}
    run(make_config(tiny_model, data, layout.root, max_steps=4, ckpt=anew), world)
    run(make_config(tiny_model, data, layout.root, max_steps=5, ckpt={"resume_step": -1}), world)
    # There are 10 rows, 4 a step. After step 1 the first epoch starts again and ends within what is then its third step.
    assert [line["data/epoch"] for line in metrics_of(layout)] == [0, 0, 0, 1, 1]
    assert [line["progress/total_samples"] for line in metrics_of(layout)] == [4, 4, 8, 12, 16]


def test_a_fork_may_have_other_settings_and_another_run_may_not(tiny_model: Path, data: Path, world, tmp_path: Path) -> None:
    first, fork = RunLayout(tmp_path / "first"), RunLayout(tmp_path / "fork")
    run(make_config(tiny_model, data, first.root, max_steps=2), world)
    adopt(first.root, Step(2), into=fork)
    changed = {"max_steps": 3, "optim": {"lr": 1e-4}}
    with pytest.raises(ResumeError, match=r"optim\.lr was 0\.003 and is 0\.0001 now"):
        run(make_config(tiny_model, data, fork.root, ckpt={"resume_step": 2}, **changed), world)
    run(make_config(tiny_model, data, fork.root, ckpt={"resume_step": 2, "allow_changes": ["*"]}, **changed), world)
    assert committed_steps(fork) == [2, 3]
    assert committed_steps(first) == [2]


def mixed_data(directory: Path) -> dict[str, object]:
    """Write two sources of unequal size, which are drawn by chance."""
    for subset, words in (
        ("short", ["ab", "cd", "ef"]),
        ("long", ["stone", "river", "words", "every", "night", "green", "house"]),
    ):
        (directory / subset).mkdir(parents=True)
        lines = (json.dumps({"prompt": word, "completion": word[::-1]}) + "\n" for word in words)
        (directory / subset / "train.jsonl").write_text("".join(lines))
    return {
        "name": str(directory),
        "subsets": ["short", "long"],
        "probabilities": [0.3, 0.7],
        "stopping_strategy": "all_exhausted",
        "batch_size": 4,
    }


def test_a_resumed_run_of_a_mixture_sees_the_same_rows_over_epochs(tiny_model: Path, data: Path, world, tmp_path: Path) -> None:
    whole, broken = RunLayout(tmp_path / "whole"), RunLayout(tmp_path / "broken")
    changes = {"data": mixed_data(tmp_path / "mixture"), "ckpt": {"interval": 1}}
    run(make_config(tiny_model, data, whole.root, max_steps=6, **changes), world)
    run(make_config(tiny_model, data, broken.root, max_steps=3, **changes), world)
    run(make_config(tiny_model, data, broken.root, max_steps=6, **changes | {"ckpt": {"resume_step": -1}}), world)
    assert metrics_of(whole)[-1]["data/epoch"] > 0
    assert [line["loss/mean"] for line in metrics_of(broken)] == [line["loss/mean"] for line in metrics_of(whole)]
    assert verify(broken.weights_step(6)).digest == verify(whole.weights_step(6)).digest
    assert published_versions(broken) == [1, 2, 3, 6]


def test_the_held_out_loss_is_measured_at_the_start_at_the_interval_and_at_the_end(
    tiny_model: Path, data: Path, world, tmp_path: Path
) -> None:
    layout = RunLayout(tmp_path / "out")
    val = {"interval": 2, "eval_on_start": True, "data": {"name": str(data)}}
    run(make_config(tiny_model, data, layout.root, max_steps=5, val=val), world)
    measured = {line["step"]: line["val/loss"] for line in metrics_of(layout) if "val/loss" in line}
    assert list(measured) == [0, 2, 4, 5]
    assert measured[5] < measured[0]
    last = metrics_of(layout)[-1]
    assert last["val/perplexity"] == pytest.approx(math.exp(last["val/loss"]))
    assert last["time/val"] > 0


def test_measuring_changes_nothing_of_the_training(tiny_model: Path, data: Path, world, tmp_path: Path) -> None:
    with_val, without = RunLayout(tmp_path / "with"), RunLayout(tmp_path / "without")
    val = {"interval": 1, "eval_on_start": True, "data": {"name": str(data)}}
    model = {"name": str(tiny_model), "compute_dtype": "float32", "seq_len": 64, "lora": {"rank": 4, "dropout": 0.3}}
    for layout, changes in ((with_val, {"val": val}), (without, {})):
        run(make_config(tiny_model, data, layout.root, max_steps=3, model=model, **changes), world)
    assert verify(with_val.weights_step(3)).digest == verify(without.weights_step(3)).digest


@pytest.mark.parametrize(
    "packing",
    [
        {"pack_function": "stack", "micro_batch_size": 3},
        {"pack_function": "cat", "micro_batch_size": 2},
        {"pack_function": "stack"},
    ],
)
def test_loss_and_gradient_do_not_depend_on_how_conversations_are_packed(
    tiny_model: Path, data: Path, world, tmp_path: Path, packing: dict[str, object]
) -> None:
    plain, other = RunLayout(tmp_path / "plain"), RunLayout(tmp_path / "other")
    run(make_config(tiny_model, data, plain.root, max_steps=1), world)
    run(make_config(tiny_model, data, other.root, max_steps=1, data={"name": str(data), "batch_size": 4, **packing}), world)
    (first,), (second,) = metrics_of(plain), metrics_of(other)
    for name in ("loss/mean", "optim/grad_norm"):
        assert second[name] == pytest.approx(first[name], rel=1e-5)  # float32 sums in another order


def test_made_up_sequences_are_learned_without_any_data(tiny_model: Path, data: Path, world, tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / "out")
    fake = {"type": "fake", "batch_size": 2, "length": "variable"}
    run(make_config(tiny_model, data, layout.root, max_steps=5, data=fake), world)
    losses = [line["loss/mean"] for line in metrics_of(layout)]
    assert losses[-1] < losses[0]


def test_without_max_steps_the_data_is_seen_once_and_the_schedule_ends_with_it(
    tiny_model: Path, data: Path, world, tmp_path: Path
) -> None:
    layout = RunLayout(tmp_path / "out")
    schedule = {"type": "linear", "warmup_steps": 0, "decay_steps": 3}
    run(make_config(tiny_model, data, layout.root, scheduler=schedule), world)
    rates = [line["optim/lr"] for line in metrics_of(layout)]
    assert [line["step"] for line in metrics_of(layout)] == [1, 2, 3]
    assert rates[0] > rates[1] > rates[2]


def test_a_step_with_nothing_to_train_on_says_what_to_look_at(tiny_model: Path, data: Path, world, tmp_path: Path) -> None:
    short = {"name": str(tiny_model), "compute_dtype": "float32", "seq_len": 2}
    with pytest.raises(BatchError, match=r"none of the 4 conversations .* within model\.seq_len \(2\)"):
        run(make_config(tiny_model, data, tmp_path / "out", model=short, max_steps=1), world)
