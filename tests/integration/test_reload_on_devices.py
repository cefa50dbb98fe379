"""A server that loaded a policy while it served answers as one that was started with it, to the last bit of a log-probability.

On a GPU with CUDA graphs and in bfloat16, where transformers computes other roundings and cannot be the reference.
"""

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch

from support.served import PROMPTS, greedy
from support.servers import open_client, run_server
from support.tiny_models import tiny_model_writer
from trivet.config.layout import RunLayout
from trivet.weights.publish import publish
from trivet.wire.versions import PolicyVersion

pytestmark = pytest.mark.vllm

ON_GPU = {"model.dtype": "bfloat16", "model.enforce-eager": "false", "gpu-memory-utilization": "0.3"}


def writer(seed: int) -> Any:
    """Return what writes a model of four heads, which two GPUs can share."""
    return tiny_model_writer(seed=seed, hidden_size=256)


def answers(base_url: str, *, reload_from: Path | None = None) -> list[tuple[list[int], list[float]]]:
    """Return tokens and log-probabilities of each prompt, asked one after the other, after a reload if there is one."""

    async def scenario() -> list[tuple[list[int], list[float]]]:
        async with aclosing(open_client(base_url, timeout_s=240)) as client:
            found = [await greedy(client, prompt) for prompt in PROMPTS]
            if reload_from is not None:
                await client.update_weights(reload_from)
                found = [await greedy(client, prompt) for prompt in PROMPTS]
            return [(list(each.token_ids), list(each.logprobs)) for each in found]

    return asyncio.run(scenario())


def assert_reload_equals_start(flags: dict[str, str], directory: Path) -> None:
    start, layout = directory / "start", RunLayout(directory / "run")
    writer(0)(start)
    publish(layout, version=PolicyVersion(1), run_id="test", write=writer(7))
    logs = [directory / name / "inference.stdout" for name in ("reloaded", "fresh")]
    for log in logs:
        log.parent.mkdir()
    with run_server(start, log=logs[0], **flags) as server:
        before = answers(server.base_url)
        reloaded = answers(server.base_url, reload_from=layout.weights_step(1))
    with run_server(layout.weights_step(1), log=logs[1], **flags) as server:
        fresh = answers(server.base_url)
    assert reloaded == fresh
    assert before != fresh


@pytest.mark.gpu
def test_one_engine_reloaded_equals_a_fresh_one(tmp_path: Path) -> None:
    assert_reload_equals_start(ON_GPU, tmp_path)


@pytest.mark.gpu
def test_two_gpus_reloaded_equal_a_fresh_engine_of_two(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert_reload_equals_start(ON_GPU | {"parallel.tp": "2"}, tmp_path)
