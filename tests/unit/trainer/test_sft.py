"""Supervised fine-tuning from a file to published weights."""

import json
from pathlib import Path

import pytest

from trivet.checkpoints.commit import committed_steps
from trivet.checkpoints.fork import adopt
from trivet.config.layout import RunLayout
from trivet.config.trainer import SftConfig
from trivet.errors import ResumeError
from trivet.trainer.sft import run
from trivet.weights.catalog import published_versions
from trivet.weights.manifest import verify
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


def test_without_max_steps_the_data_is_seen_once(tiny_model: Path, data: Path, world, tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / "out")
    run(make_config(tiny_model, data, layout.root), world)
    assert [line["step"] for line in metrics_of(layout)] == [1, 2, 3]


def test_a_resumed_run_ends_with_the_same_weights(tiny_model: Path, data: Path, world, tmp_path: Path) -> None:
    whole, broken = RunLayout(tmp_path / "whole"), RunLayout(tmp_path / "broken")
    run(make_config(tiny_model, data, whole.root, max_steps=7), world)
    run(make_config(tiny_model, data, broken.root, max_steps=4), world)
    run(make_config(tiny_model, data, broken.root, max_steps=7, ckpt={"resume_step": 4}), world)
    assert verify(broken.weights_step(7)).digest == verify(whole.weights_step(7)).digest
    assert published_versions(broken) == [4, 7]


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
    # 10 rows, 4 a step: after step 1 the first epoch begins again and ends within what is then its third step.
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
