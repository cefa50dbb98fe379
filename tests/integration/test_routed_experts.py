"""The real server returns the experts that it chose, on this machine's CPU too, and a run trains with them."""

import asyncio
import json
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from support.families import FAMILIES
from support.family_serving import save_toy
from support.rl_run import CONFIG
from support.servers import run_server
from trivet.trainer.model.blocks import find_blocks
from trivet.trainer.model.experts import find_experts
from trivet.transport.recording import read_groups, recorded_files
from trivet.wire.experts import read_experts

pytestmark = pytest.mark.vllm
BY_NAME = {family.name: family for family in FAMILIES}
PROMPTS = [list(range(1, 40)), list(range(1, 38)), list(range(40, 20, -1)), [7, 8, 9], list(range(1, 40))]
"""Some begin with a whole block of the KV cache in common, whose experts come from the cache."""
MOE_CONFIG = CONFIG.replace("[trainer.model]", "[trainer]\nrouter_replay = true\n\n[trainer.model]").replace(
    "oversampling_factor", "record_rollouts = true\noversampling_factor"
)


def choose_alone(toy: Path, token_ids: list[int]) -> dict[int, np.ndarray]:
    """Return the experts [T, K], sorted, that transformers chooses in each block with experts."""
    model = AutoModelForCausalLM.from_pretrained(toy, dtype=torch.float32, attn_implementation="eager").eval()
    chosen: dict[int, np.ndarray] = {}

    def keep(index: int, args: tuple[torch.Tensor, ...]) -> None:
        chosen[index] = args[1].sort(dim=-1).values.numpy()

    for index, block in enumerate(find_blocks(model)):
        for module in block.modules():
            if (experts := find_experts(module)) is not None:
                experts.register_forward_pre_hook(lambda _, args, index=index: keep(index, args))
    with torch.no_grad():
        model(input_ids=torch.tensor([token_ids]))
    return chosen


async def generate(base_url: str) -> list[dict[str, object]]:
    async with httpx.AsyncClient(base_url=base_url, timeout=240) as client:

        async def ask(token_ids: list[int]) -> dict[str, object]:
            sampling = {"max_tokens": 20, "temperature": 1.0, "logprobs": 0, "seed": len(token_ids)}
            answer = await client.post("/inference/v1/generate", json={"token_ids": token_ids, "sampling_params": sampling})
            answer.raise_for_status()
            return answer.json()["choices"][0]

        return [*await asyncio.gather(*map(ask, PROMPTS)), *await asyncio.gather(*map(ask, PROMPTS))]


@pytest.mark.parametrize(
    "name",
    ["Qwen3-MoE", *(pytest.param(name, marks=pytest.mark.slow) for name in ("GLM-4-MoE", "OLMoE", "GPT-OSS", "DeepSeek-V3"))],
)
def test_the_server_returns_the_experts_that_transformers_chooses(name: str, tmp_path: Path) -> None:
    toy = save_toy(BY_NAME[name], tmp_path / "toy")
    with run_server(toy, log=tmp_path / "inference.stdout", **{"return-routed-experts": "true"}) as server:
        choices = asyncio.run(generate(server.base_url))
    for prompt, choice in zip([*PROMPTS, *PROMPTS], choices, strict=True):
        token_ids = [*prompt, *choice["token_ids"]]  # type: ignore[misc]
        experts_TLK = read_experts(str(choice["routed_experts"]))
        assert len(experts_TLK) == len(token_ids) - 1
        for index, expected_TK in choose_alone(toy, token_ids).items():
            np.testing.assert_array_equal(np.sort(experts_TLK[:, index], axis=-1), expected_TK[:-1])


def test_a_run_trains_with_the_experts_of_its_server(make_run, tmp_path: Path) -> None:
    run = make_run(max_steps=4, model=save_toy(BY_NAME["Qwen3-MoE"], tmp_path / "toy"), template=MOE_CONFIG)
    run.start()
    assert run.await_exit() == 0, run.output[-4000:]
    samples = [
        sample
        for path in recorded_files(run.layout.root)
        for group in read_groups(path).groups
        for rollout in group.rollouts
        for sample in rollout.samples
    ]
    assert samples
    assert all(sample.experts is not None for sample in samples)
    assert {sample.experts.shape[0] - sample.num_tokens for sample in samples if sample.experts} == {-1}
    steps = [json.loads(line) for line in (run.layout.metrics / "trainer.jsonl").read_text().splitlines()]
    assert all(1 <= step["experts/load/mean"] <= 4 for step in steps)
    assert steps[0]["mismatch_kl/mean"] < 1e-4
