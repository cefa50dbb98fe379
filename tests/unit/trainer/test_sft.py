"""Supervised fine-tuning from a file to published weights."""

import json
from pathlib import Path

import pytest

from trivet.checkpoints.commit import committed_steps
from trivet.config.layout import RunLayout
from trivet.config.trainer import SftConfig
from trivet.trainer.sft import run
from trivet.weights.catalog import published_versions
from trivet.weights.manifest import verify


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
