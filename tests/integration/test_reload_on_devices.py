"""A server that loaded a policy while it served answers as one that was started with it, to the last bit of a log-probability.

On a GPU with CUDA graphs and in bfloat16, where transformers computes other roundings and cannot be the reference.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from support.served import assert_reload_equals_start
from support.tiny_models import tiny_model_writer
from trivet.config.layout import RunLayout
from trivet.weights.publish import publish
from trivet.wire.versions import PolicyVersion

pytestmark = pytest.mark.vllm

ON_GPU = {"model.dtype": "bfloat16", "model.enforce-eager": "false", "gpu-memory-utilization": "0.3"}


def writer(seed: int) -> Any:
    """Return what writes a model of four heads, which two GPUs can share."""
    return tiny_model_writer(seed=seed, hidden_size=256)


def publish_other(directory: Path) -> tuple[Path, Path]:
    """Write a start model and publish another of its shape as version 1; return the directories of both."""
    start, layout = directory / "start", RunLayout(directory / "run")
    writer(0)(start)
    publish(layout, version=PolicyVersion(1), run_id="test", write=writer(7))
    return start, layout.weights_step(1)


@pytest.mark.gpu
def test_one_engine_reloaded_equals_a_fresh_one(tmp_path: Path) -> None:
    assert_reload_equals_start(*publish_other(tmp_path), logs=tmp_path, **ON_GPU)


@pytest.mark.gpu
def test_two_gpus_reloaded_equal_a_fresh_engine_of_two(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert_reload_equals_start(*publish_other(tmp_path), logs=tmp_path, **ON_GPU, **{"parallel.tp": "2"})
