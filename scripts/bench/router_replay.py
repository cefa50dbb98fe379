"""How far are the trainer's log-probabilities from the server's with the server's experts replayed, and without?

A real server samples from a toy of Qwen3-MoE whose routers are noisy: 4 of 32 experts in each of 4 layers, random weights, scores
close to each other. The trainer scores the same tokens twice, in the same dtype. Rounding alone remains with the replay; the
same toy in float32 shows what both would give without rounding.

    uv run python scripts/bench/router_replay.py [--dtype bfloat16] [--requests 64] [--tokens 64]

`mismatch_kl` is the metric of a run, exp(d) - 1 - d on average over sampled tokens, for the difference d of both log-probabilities.
`flipped` is the share of choices (tokens times layers) for which the routers of both choose different experts. The last line is one
JSON object.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from receiving import free_port
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from trivet.algorithms.packing import PackItem, pack
from trivet.client.inference_client import InferenceClient
from trivet.config.schema.model import TrainerModelConfig
from trivet.environments.apis.turns import Turn, make_turn, to_samples
from trivet.examples.tiny_model import make_tokenizer
from trivet.trainer.model.experts import find_experts
from trivet.trainer.model.policy_model import PolicyModel, load_policy, scoring
from trivet.trainer.ranks.world import open_world
from trivet.trainer.rows import plan_rows
from trivet.wire.batches import MicroBatch
from trivet.wire.rollouts import Sample

SEQ_LEN = 1024
ROUTER_SCALE = 0.02
"""Standard deviation of router weights. Scores of neighbouring experts then differ by about as much as bfloat16 rounds."""


def save_toy(directory: Path) -> None:
    """Write the toy and its tokenizer."""
    tokenizer = make_tokenizer()
    config_class: Any = Qwen3MoeConfig  # type checkers see its constructor without the fields of its base
    config = config_class(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        max_position_embeddings=SEQ_LEN,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=ROUTER_SCALE if name.endswith("mlp.gate.weight") else 0.12)
    model.bfloat16().save_pretrained(directory)
    tokenizer.save_pretrained(directory)


async def sample(base_url: str, *, num_requests: int, num_tokens: int, vocab_size: int) -> list[Sample]:
    """Let the server complete random prompts."""
    async with aclosing(InferenceClient(base_url, timeout_s=600)) as client:
        await client.wait_ready(600)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, vocab_size, 16).tolist() for _ in range(num_requests)]
    async with httpx.AsyncClient(base_url=base_url, timeout=600) as http:

        async def ask(prompt: list[int]) -> Turn:
            sampling = {"max_tokens": num_tokens, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}
            answer = await http.post("/inference/v1/generate", json={"token_ids": prompt, "sampling_params": sampling})
            choice: dict[str, Any] = answer.raise_for_status().json()["choices"][0]
            return make_turn(
                prompt_ids=prompt,
                completion_ids=choice["token_ids"],
                logprobs=[token["logprob"] for token in choice["logprobs"]["content"]],
                policy_versions=choice["policy_versions"],
                is_truncated=True,
                routed_experts=choice["routed_experts"],
            )

        turns = await asyncio.gather(*map(ask, prompts))
    return to_samples(turns, temperature=1.0, strategy="branching")[0]


def score(model: PolicyModel, rows: list[MicroBatch]) -> dict[str, float]:
    """Return the mismatch of the trainer's log-probabilities and the server's."""
    differences: list[np.ndarray] = []
    with scoring(model):
        for row in plan_rows(rows, num_ranks=1, shares_prefixes=False).take(0, device=torch.device("cpu")):
            differences.append((model(row).logprobs_N.double() - row.sampler_logprobs_N.double()).numpy())
    d = np.concatenate(differences)
    return {"mismatch_kl": float((np.exp(d) - 1 - d).mean()), "mean_difference": float(np.abs(d).mean())}


def share_flipped(model: PolicyModel, rows: list[MicroBatch]) -> float:
    """Return the share of choices in which the model's routers differ from the server's, both following the same tokens."""
    chosen: list[torch.Tensor] = []
    mixtures = [experts for module in model.modules() if (experts := find_experts(module)) is not None]
    hooks = [experts.register_forward_pre_hook(lambda _, args: chosen.append(args[1])) for experts in mixtures]
    num_flipped = num_known = 0
    with scoring(model):
        for row in plan_rows(rows, num_ranks=1, shares_prefixes=False).take(0, device=torch.device("cpu")):
            served_ULK = row.experts_ULK
            assert served_ULK is not None
            chosen.clear()
            model(replace(row, experts_ULK=None))
            own_ULK = torch.stack([experts_UK.sort(dim=-1).values for experts_UK in chosen], dim=1)
            known_UL = served_ULK[..., 0] >= 0
            num_flipped += int(((own_ULK != served_ULK).any(dim=-1) & known_UL).sum())
            num_known += int(known_UL.sum())
    for hook in hooks:
        hook.remove()
    return num_flipped / num_known


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory, port = Path(name), free_port()
        save_toy(directory / "toy")
        flags = {
            "model.name": str(directory / "toy"),
            "model.dtype": args.dtype,
            "model.enforce-eager": "true",
            "model.max-model-len": str(SEQ_LEN),
            "cpu-kv-cache-gib": "0.25",
            "server.port": str(port),
            "output-dir": name,
            "return-routed-experts": "true",
        }
        command = [sys.executable, "-m", "trivet.inference.main", *(word for key in flags for word in (f"--{key}", flags[key]))]
        with (directory / "log").open("wb") as log:
            server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            base_url = f"http://127.0.0.1:{port}"
            vocab_size = len(make_tokenizer())
            samples = asyncio.run(sample(base_url, num_requests=args.requests, num_tokens=args.tokens, vocab_size=vocab_size))
        finally:
            server.terminate()
            server.wait()
        rows = pack([PackItem(sample=sample, advantage=0.0) for sample in samples], seq_len=SEQ_LEN)
        with open_world(device="cpu", timeout_s=600) as world:
            config = TrainerModelConfig(name=str(directory / "toy"), compute_dtype=args.dtype, seq_len=SEQ_LEN)
            model = load_policy(config, world)
            flipped = share_flipped(model, rows)
            replayed = score(model, rows)
            experts = [known for row in rows for known in row.experts_S if known is not None]
            for row in rows:
                row.experts_S = []
            own = score(model, rows)
    num_bytes = sum(len(known.data) for known in experts)
    result = {
        "bench": "router_replay",
        "dtype": args.dtype,
        "mismatch_kl_with": replayed["mismatch_kl"],
        "mismatch_kl_without": own["mismatch_kl"],
        "mean_difference_with": replayed["mean_difference"],
        "mean_difference_without": own["mean_difference"],
        "flipped": round(flipped, 4),
        "bytes_per_expert": round(num_bytes / sum(int(np.prod(known.shape)) for known in experts), 3),
        "sampled_tokens": sum(sample.num_loss_tokens for sample in samples),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
