"""Which way of computing a mixture's experts is the fastest: `eager` (a loop), `batched_mm` or `grouped_mm`?

One block of Qwen3-MoE's experts computes random tokens forward and backward, routed at random, for several numbers of experts and
tokens. `model.experts_implementation` chooses among the same three in training. The ceiling is one dense product over as many
rows as there are tokens times experts of a token: `share_of_dense` is its time divided by that of the experts.

    uv run python scripts/bench/experts.py [--dtype bfloat16] [--repeats 5] [--device cpu]

Medians after one pass to warm up. The last line is one JSON object.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
SHAPES = ((8, 2, 512), (32, 4, 512), (32, 4, 4096), (128, 8, 512), (128, 8, 4096))
"""Experts, experts of a token, tokens."""
HIDDEN, INNER = 256, 128
MAX_BATCHED_BYTES = 2 << 30
"""`batched_mm` copies the matrices of every choice; above this size it is left out."""


def measure(compute: Callable[[], torch.Tensor], *, repeats: int, device: str) -> float:
    """Return the median seconds of forward and backward."""
    seconds: list[float] = []
    for _ in range(1 + repeats):
        started = time.perf_counter()
        compute().square().mean().backward()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()
    dtype, rows = getattr(torch, args.dtype), []
    torch.manual_seed(0)
    for num_experts, num_chosen, num_tokens in SHAPES:
        config: Any = Qwen3MoeConfig(num_experts=num_experts, hidden_size=HIDDEN, moe_intermediate_size=INNER)
        module: Any = Qwen3MoeExperts(config)
        module.to(device=args.device, dtype=dtype)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        hidden = torch.randn(num_tokens, HIDDEN, device=args.device, dtype=dtype, requires_grad=True)
        weights, chosen = torch.rand(num_tokens, num_experts, device=args.device).topk(num_chosen, dim=-1)
        wide = torch.randn(num_tokens * num_chosen, HIDDEN, device=args.device, dtype=dtype, requires_grad=True)
        up, down = (torch.nn.Parameter(stack[0].detach().clone()) for stack in (module.gate_up_proj, module.down_proj))

        def compute_dense(wide: torch.Tensor = wide, up: torch.Tensor = up, down: torch.Tensor = down) -> torch.Tensor:
            gate, value = (wide @ up.T).chunk(2, dim=-1)
            return (torch.nn.functional.silu(gate) * value) @ down.T

        seconds: dict[str, float] = {}
        for name in IMPLEMENTATIONS:
            if name == "batched_mm" and num_tokens * num_chosen * up.numel() * up.element_size() > MAX_BATCHED_BYTES:
                continue
            config._experts_implementation = name
            seconds[name] = measure(lambda: module(hidden, chosen, weights.to(dtype)), repeats=args.repeats, device=args.device)  # noqa: B023
        dense_s = measure(compute_dense, repeats=args.repeats, device=args.device)
        fastest = min(seconds, key=seconds.__getitem__)
        rows.append(
            {
                "experts": num_experts,
                "chosen": num_chosen,
                "tokens": num_tokens,
                "seconds": {name: round(value, 5) for name, value in seconds.items()},
                "fastest": fastest,
                "share_of_dense": round(dense_s / seconds[fastest], 3),
            }
        )
    result = {
        "bench": "experts",
        "dtype": args.dtype,
        "device": args.device,
        "threads": torch.get_num_threads(),
        "shapes": rows,
    }
    print(json.dumps({**result, "repeats": args.repeats, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
