"""How fast does the trainer train packed rows, what share of the machine's matrix-multiplication rate is that, and where does
the time go?

The ceiling is the rate of one large matrix product in the compute dtype, measured in the same run, just before each side. Beside it
runs what one would write without us: plain transformers with full logits, FSDP2 over one gloo rank, the same compute
dtype over float32 master weights, the same AdamW. Samples have one length, so that the plain loop pads nothing.

    uv run python scripts/bench/training.py [--model tiny|DIRECTORY] [--dtype float32] [--tokens 2048 8192] [--length 128]
        [--repeats 5] [--rounds 2]

Each side is a process of its own, so that its peak of memory is its own; both get the allocator settings of the launcher. The
sides take turns. Medians over all repeats after two warm-up steps; `parts` are of a step more, shares of all threads'
time; `probe_share` is what scoring a policy's probe adds to a step (bar: 0.03). The last line is one JSON object; its top level is
the smallest size, `sizes` has all.
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
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch._C._profiler import _ExperimentalConfig
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from trivet.algorithms.packing import PackItem, pack
from trivet.algorithms.probe import cut_samples
from trivet.config.compute_dtype import choose_dtype
from trivet.config.schema.losses import DefaultLossConfig
from trivet.config.schema.model import ComputeDtype, TrainerModelConfig
from trivet.config.schema.shared import WeightsConfig
from trivet.config.schema.trainer import AdamWConfig, ConstantSchedule
from trivet.launcher.plan import rank_environment
from trivet.machine import inspect_machine
from trivet.trainer.losses.formulas import make_policy_loss
from trivet.trainer.measurement.performance import model_cost, peak_memory_gib
from trivet.trainer.model.policy_model import load_policy
from trivet.trainer.optim.optimizer import LearningRate, make_optimizer
from trivet.trainer.probe import score, split_samples
from trivet.trainer.ranks.world import World, open_world
from trivet.trainer.step import Learner, train_step
from trivet.wire.rollouts import Sample
from trivet.wire.versions import Step

ROW_TOKENS = 2048
"""Tokens of a packed row, and of what the plain loop computes at one time."""
_LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
"""Variables by which torch, oneDNN and MKL leave instruction sets of the processor unused."""
WARM_UP = 2
_OPERATORS = 12
"""Parts of the time that are listed."""

Seconds = list[float]


def make_items(count: int, *, length: int, vocab_size: int) -> list[PackItem]:
    """Make samples of which the second half is trained on."""
    rng = np.random.default_rng(0)
    return [
        PackItem(
            sample=Sample(
                token_ids_T=rng.integers(0, vocab_size, length).astype(np.int32),
                loss_mask_T=np.arange(length) >= length // 2,
                logprobs_T=np.full(length, -np.log(vocab_size), dtype=np.float32),
                versions=[],
                temperature=1.0,
            ),
            advantage=float(rng.normal()),
        )
        for _ in range(count)
    ]


def time_steps(step: Callable[[], object], *, repeats: int, clock: Callable[[], float] = time.perf_counter) -> Seconds:
    """Return the seconds of each repeat, after the warm-up, by `clock`."""
    seconds: Seconds = []
    for _ in range(WARM_UP + repeats):
        started = clock()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(clock() - started)
    return seconds[WARM_UP:]


def matmul_flops(
    dtype: torch.dtype, device: torch.device, *, size: int = 2048, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the operations per second, by `clock`, of the best of several large products."""
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / min(time_steps(lambda: a @ b, repeats=10, clock=clock))


def make_our_learner(model_name: str, dtype: ComputeDtype, world: World, *, seq_len: int = ROW_TOKENS) -> Learner:
    """Load the model as the trainer does, with the trainer's optimizer and its default loss."""
    model = load_policy(TrainerModelConfig(name=model_name, seq_len=seq_len, compute_dtype=dtype), world)
    return Learner(
        model=model,
        optimizer=make_optimizer(model.trained_parameters, AdamWConfig()),
        learning_rate=LearningRate(peak=1e-6, schedule=ConstantSchedule(), max_steps=None),
        loss=make_policy_loss(DefaultLossConfig()),
        max_norm=1.0,
        world=world,
    )


def make_our_step(
    args: argparse.Namespace, items: list[PackItem], world: World
) -> tuple[Callable[[], object], Callable[[], object], dict[str, Any]]:
    """Return the trainer's own step, its scoring of a probe of the default size, and the cost of its model."""
    learner = make_our_learner(args.model, args.dtype, world)
    model, rows = learner.model, pack(items, seq_len=ROW_TOKENS)
    flops = model_cost(model).flops([item.sample.num_tokens for item in items])
    cost = {"model_flops": flops, "parameters": model.num_parameters, "lanes": model.lanes.count}
    samples = cut_samples([sample for row in rows for sample in split_samples(row)], num_tokens=WeightsConfig().probe_tokens)
    return lambda: train_step(learner, rows, step=Step(1)), lambda: score(model, samples, world, dtype=args.dtype), cost


def make_plain_step(args: argparse.Namespace, items: list[PackItem], world: World) -> Callable[[], None]:
    """Return one step of the loop that everyone writes first."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model = loaded.to(world.device).train()
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, args.dtype), reduce_dtype=torch.float32)
    for block in model.base_model.layers:
        fully_shard(block, mesh=world.mesh, mp_policy=policy)
    fully_shard(model, mesh=world.mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.01, fused=True)
    num_loss_tokens = sum(item.sample.num_loss_tokens for item in items)
    at_once = max(1, ROW_TOKENS // args.length)
    batches: list[tuple[torch.Tensor, torch.Tensor]] = []
    for start in range(0, len(items), at_once):
        samples = [item.sample for item in items[start : start + at_once]]
        ids_BT, mask_BT = (np.stack([getattr(s, name) for s in samples]) for name in ("token_ids_T", "loss_mask_T"))
        batches.append((torch.from_numpy(ids_BT).long().to(world.device), torch.from_numpy(mask_BT).to(world.device)))

    def step() -> None:
        for ids_BT, mask_BT in batches:
            logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1]
            logprobs_BTV = torch.log_softmax(logits_BTV.float(), dim=-1)
            logprobs_BT = logprobs_BTV.gather(2, ids_BT[:, 1:, None])[..., 0]
            (-(logprobs_BT * mask_BT[:, 1:]).sum() / num_loss_tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure_side(args: argparse.Namespace) -> dict[str, Any]:
    """Measure one side at one size, in a process of its own."""
    vocab_size = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
    items = make_items(max(1, args.side_tokens // args.length), length=args.length, vocab_size=vocab_size)
    with open_world(device="auto", timeout_s=600) as world:
        rate = matmul_flops(getattr(torch, args.dtype), world.device)
        found: dict[str, Any] = {"matmul_flops": rate}
        if args.side == "plain":
            step: Callable[[], object] = make_plain_step(args, items, world)
        else:
            step, probe, cost = make_our_step(args, items, world)
            found |= cost | {"probe_seconds": time_steps(probe, repeats=args.repeats)}
        found["seconds"] = time_steps(step, repeats=args.repeats)
        found["peak_rss_gib"] = peak_memory_gib(world.device)
        with profile(
            activities=[ProfilerActivity.CPU], experimental_config=_ExperimentalConfig(profile_all_threads=True)
        ) as spent:
            step()
        events = sorted(spent.key_averages(), key=lambda event: -event.self_cpu_time_total)
        total = sum(event.self_cpu_time_total for event in events)
        found["parts"] = {event.key: round(event.self_cpu_time_total / total, 3) for event in events[:_OPERATORS]}
    return found


def run_side(side: str, tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run `measure_side` in a process of its own."""
    wanted = rank_environment(1, num_cpus=os.cpu_count() or 1, is_on_cpu=not torch.cuda.is_available())
    words = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in ("model", "length", "dtype", "repeats")]
    command = [sys.executable, __file__, *words, f"--side={side}", f"--side-tokens={tokens}"]
    done = subprocess.run(command, env={**wanted, **os.environ}, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure_size(tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure both sides in turns."""
    rounds = [{side: run_side(side, tokens, args) for side in ("plain", "ours")} for _ in range(args.rounds)]
    seconds = {side: [s for each in rounds for s in each[side]["seconds"]] for side in ("plain", "ours")}
    ours, plain = (statistics.median(seconds[side]) for side in ("ours", "plain"))
    rate = statistics.median(each[side]["matmul_flops"] for each in rounds for side in each)
    count = max(1, tokens // args.length) * args.length
    last = rounds[-1]
    return {
        "tokens": count,
        "tokens_per_s": round(count / ours, 1),
        "plain_tokens_per_s": round(count / plain, 1),
        "ratio_to_plain": round(plain / ours, 3),
        "matmul_share": round(6 * last["ours"]["parameters"] * count / ours / rate, 4),
        "plain_matmul_share": round(6 * last["ours"]["parameters"] * count / plain / rate, 4),
        "model_flops_share": round(last["ours"]["model_flops"] / ours / rate, 4),
        "peak_rss_gib": round(max(each["ours"]["peak_rss_gib"] for each in rounds), 3),
        "plain_peak_rss_gib": round(max(each["plain"]["peak_rss_gib"] for each in rounds), 3),
        "step_s": round(ours, 4),
        "probe_share": round(statistics.median(s for each in rounds for s in each["ours"]["probe_seconds"]) / ours, 4),
        "spread_s": round(max(seconds["ours"]) - min(seconds["ours"]), 4),
        "plain_step_s": round(plain, 4),
        "plain_spread_s": round(max(seconds["plain"]) - min(seconds["plain"]), 4),
        "matmul_tflops": round(rate / 1e12, 3),
        "parameters": last["ours"]["parameters"],
        "lanes": last["ours"]["lanes"],
        "parts": last["ours"]["parts"],
        "plain_parts": last["plain"]["parts"],
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="a model directory; `tiny` makes the quickstart's")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192], help="a step's")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sample")
    own = choose_dtype(inspect_machine(), is_on_gpu=torch.cuda.is_available()).dtype
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float32"], default=own, help="default: what a run takes on this machine"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--side", choices=["ours", "plain"], help=argparse.SUPPRESS)
    parser.add_argument("--side-tokens", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(measure_side(args)))
        return
    name = args.model
    with tempfile.TemporaryDirectory() as scratch:
        if args.model == "tiny":
            args.model = str(Path(scratch) / "tiny")
            subprocess.run([sys.executable, "-m", "trivet.examples.tiny_model", args.model], check=True)
        sizes = [measure_size(tokens, args) for tokens in args.tokens]
    print(
        json.dumps(
            {
                "benchmark": "training",
                "dtype": args.dtype,
                **sizes[0],
                "sizes": sizes,
                "config": {"model": name} | {key: getattr(args, key) for key in ("length", "dtype", "repeats", "rounds")},
                "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
                "hardware": hardware(),
            }
        )
    )


def hardware() -> dict[str, Any]:
    """Describe the processor and the limits that the figures depend on."""
    return {
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "limits": {name: os.environ[name] for name in _LIMITS if name in os.environ},
    }


if __name__ == "__main__":
    main()
