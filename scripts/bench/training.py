"""How fast does the trainer train packed rows, and what share of the machine's matrix-multiplication rate is that?

The ceiling is the rate of one large matrix product in the compute dtype, measured in the same run; attention, norms and the
optimizer keep every model below it, small ones most. Beside it runs what one would write without us: the same
samples, padded in batches, plain transformers with full logits, autocast, the same AdamW.

    uv run python scripts/bench/training.py [--model tiny|DIRECTORY] [--samples 128] [--dtype bfloat16|float32] [--repeats 5]

One rank, the allocator settings of the launcher on both sides. Medians over the repeats after a warm-up; tokens are those of
prompts and completions, padding not counted. The last line is one JSON object.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

from trivet.algorithms.packing import PackItem, pack
from trivet.config.losses import DefaultLossConfig
from trivet.config.trainer import AdamWConfig, ConstantSchedule, TrainerModelConfig
from trivet.launcher.plan import rank_environment
from trivet.trainer.distributed import World, open_world
from trivet.trainer.losses.select import make_policy_loss
from trivet.trainer.model import load_policy
from trivet.trainer.optimizer import LearningRate, make_optimizer
from trivet.trainer.performance import ModelCost, model_cost, peak_memory_gib
from trivet.trainer.step import Learner, train_step
from trivet.wire.rollouts import Sample
from trivet.wire.versions import Step

_ROOT = Path(__file__).parents[2]
_PLAIN_ROWS = 32
"""Padded samples that the plain loop computes at one time: the fastest of what was tried."""


def keep_memory() -> None:
    """Start again with the environment that the launcher gives a rank on the CPU; the allocator reads it only at start."""
    wanted = rank_environment(1, num_cpus=os.cpu_count() or 1, is_on_cpu=not torch.cuda.is_available())
    if any(name not in os.environ for name in wanted):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**wanted, **os.environ})


def make_items(count: int, *, length: int, vocab_size: int) -> list[PackItem]:
    """Samples of 0.7 to 1.3 times `length` tokens, of which the second half is trained on."""
    rng = np.random.default_rng(0)
    items: list[PackItem] = []
    for _ in range(count):
        num_tokens = int(rng.integers(int(length * 0.7), int(length * 1.3) + 1))
        sample = Sample(
            token_ids_T=rng.integers(0, vocab_size, num_tokens).astype(np.int32),
            loss_mask_T=np.arange(num_tokens) >= num_tokens // 2,
            logprobs_T=np.full(num_tokens, -np.log(vocab_size), dtype=np.float32),
            versions=[],
            temperature=1.0,
        )
        items.append(PackItem(sample=sample, advantage=float(rng.normal())))
    return items


def time_repeats(step: Callable[[], object], *, repeats: int) -> list[float]:
    """Seconds of each repeat, after a warm-up."""
    seconds: list[float] = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return seconds[1:]


def matmul_flops(dtype: torch.dtype, device: torch.device, *, size: int = 2048) -> float:
    """Operations per second of the best of several large products."""
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / min(time_repeats(lambda: a @ b, repeats=10))


def make_plain_step(model_dir: Path, items: list[PackItem], dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    """One step of the loop that everyone writes first."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model = loaded.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.01)
    ordered = sorted((item.sample for item in items), key=lambda sample: sample.num_tokens)
    num_loss_tokens = sum(sample.num_loss_tokens for sample in ordered)
    batches: list[tuple[torch.Tensor, torch.Tensor]] = []
    for start in range(0, len(ordered), _PLAIN_ROWS):
        samples = ordered[start : start + _PLAIN_ROWS]
        ids_BT, mask_BT = (
            torch.nn.utils.rnn.pad_sequence([torch.from_numpy(getattr(s, name)) for s in samples], batch_first=True)
            for name in ("token_ids_T", "loss_mask_T")
        )
        batches.append((ids_BT.long().to(device), mask_BT.to(device)))

    def step() -> None:
        for ids_BT, mask_BT in batches:
            with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
                logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1]
            logprobs_BTV = torch.log_softmax(logits_BTV.float(), dim=-1)
            logprobs_BT = logprobs_BTV.gather(2, ids_BT[:, 1:, None])[..., 0]
            (-(logprobs_BT * mask_BT[:, 1:]).sum() / num_loss_tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """What our own side measured."""

    seconds: list[float]
    items: list[PackItem]
    num_rows: int
    cost: ModelCost
    num_parameters: int
    peak_rss_gib: float


def measure_packed(model_dir: Path, args: argparse.Namespace, world: World) -> Packed:
    model = load_policy(TrainerModelConfig(name=str(model_dir), seq_len=args.seq_len, compute_dtype=args.dtype), world)
    learner = Learner(
        model=model,
        optimizer=make_optimizer(model.parameters(), AdamWConfig()),
        learning_rate=LearningRate(peak=1e-6, schedule=ConstantSchedule(), max_steps=None),
        loss=make_policy_loss(DefaultLossConfig()),
        max_norm=1.0,
        world=world,
    )
    items = make_items(args.samples, length=args.length, vocab_size=model.embedding.num_embeddings)
    rows = pack(items, seq_len=args.seq_len)
    return Packed(
        seconds=time_repeats(lambda: train_step(learner, rows, step=Step(1)), repeats=args.repeats),
        items=items,
        num_rows=len(rows),
        cost=model_cost(model),
        num_parameters=model.num_parameters,
        peak_rss_gib=peak_memory_gib(world.device),
    )


def measure(model_dir: Path, args: argparse.Namespace) -> dict[str, object]:
    dtype = getattr(torch, args.dtype)
    with open_world(device="auto", timeout_s=600) as world:
        # First, so that the peak of memory is ours.
        packed = measure_packed(model_dir, args, world)
        rate = matmul_flops(dtype, world.device)
        plain = time_repeats(make_plain_step(model_dir, packed.items, dtype, world.device), repeats=args.repeats)
    lengths = [item.sample.num_tokens for item in packed.items]
    step_s, plain_step_s = statistics.median(packed.seconds), statistics.median(plain)
    return {
        "tokens_per_s": round(sum(lengths) / step_s, 1),
        "plain_tokens_per_s": round(sum(lengths) / plain_step_s, 1),
        "matmul_share": round(packed.cost.flops(lengths) / step_s / rate, 4),
        "peak_rss_gib": round(packed.peak_rss_gib, 3),
        "step_s": round(step_s, 4),
        "spread_s": round(max(packed.seconds) - min(packed.seconds), 4),
        "plain_step_s": round(plain_step_s, 4),
        "plain_spread_s": round(max(plain) - min(plain), 4),
        "matmul_tflops": round(rate / 1e12, 3),
        "tokens": sum(lengths),
        "rows": packed.num_rows,
        "parameters": packed.num_parameters,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="a model directory; `tiny` makes the quickstart's")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=50, help="mean tokens of a sample")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    keep_memory()
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = Path(args.model)
        if args.model == "tiny":
            model_dir = Path(scratch) / "tiny"
            subprocess.run([sys.executable, _ROOT / "scripts" / "make_tiny_model.py", model_dir], check=True)
        results = measure(model_dir, args)
    print(
        json.dumps(
            {
                "benchmark": "training",
                **results,
                "config": {name: getattr(args, name) for name in ("model", "samples", "length", "seq_len", "dtype", "repeats")},
                "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
                "hardware": {"cpu": platform.processor() or platform.machine(), "threads": torch.get_num_threads()},
            }
        )
    )


if __name__ == "__main__":
    main()
