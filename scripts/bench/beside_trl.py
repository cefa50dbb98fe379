"""How fast does the trainer train next to TRL's GRPO trainer, on the same samples, in the same run?

TRL gets its fastest settings on a CPU: 32 samples at once, no gradient checkpointing, logits of completions alone, "medium"
precision of float32 products. It is measured twice: with float32 weights, which is what a trainer with float32 master weights
compares to, and with bfloat16 weights and moments, which are faster and lose small updates. What it generates is not counted: its
own training loop gets the samples ready made. Ours is scripts/bench/training.py's.

    pip install --target DIRECTORY --no-deps trl==1.16.0
    uv run python scripts/bench/beside_trl.py --trl DIRECTORY --model models/smollm2 [--dtype float32] [--tokens 2048 8192]
        [--repeats 3] [--rounds 2]

Each side is a process of its own, all with the allocator settings of the launcher, and they take turns. Medians over all repeats
after two warm-up steps. The last line is one JSON object; `ratio_to_*` says how many times as fast ours is.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from training import WARM_UP, hardware, make_items
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from trivet.launcher.plan import rank_environment
from trivet.trainer.measurement.performance import peak_memory_gib

AT_ONCE = 32
"""Samples of a device batch of TRL's."""
SIDES = {"bfloat16": ("ours", "trl_float32", "trl_bfloat16"), "float32": ("ours", "trl_float32")}
"""By the dtype that ours computes in. Bfloat16 is not TRL's fastest where the processor emulates it."""

TRL_SETTINGS: dict[str, Any] = {
    "learning_rate": 1e-6,
    "max_grad_norm": 1.0,
    "beta": 0.0,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "logging_strategy": "no",
    "report_to": "none",
}
"""Settings of every measurement of TRL: the loss and the update of ours, on a CPU, with nothing written."""


class Clock(TrainerCallback):
    """Measures the seconds of each step of TRL's loop."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._started = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Note when the step begins."""
        self._started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Note how long the step took."""
        self.seconds.append(time.perf_counter() - self._started)


def measure_trl(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the seconds of each step of TRL's loop, in a process of its own."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[reportMissingImports]  it is nowhere but in --trl

    torch.set_float32_matmul_precision("medium")
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.side.removeprefix("trl_")))
    count = max(1, args.side_tokens // args.length)
    batches = _batches(count, length=args.length, vocab_size=model.config.vocab_size)

    class Trainer(GRPOTrainer):
        """Trains on samples that exist already."""

        def _prepare_inputs(self, generation_batch: Any) -> Any:
            return batches[self._step % len(batches)]

    clock = Clock()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Trainer(
            model=model,
            processing_class=AutoTokenizer.from_pretrained(args.model),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            train_dataset=Dataset.from_dict({"prompt": ["a"] * count}),
            callbacks=[clock],
            args=GRPOConfig(
                output_dir=scratch,
                per_device_train_batch_size=min(count, AT_ONCE),
                gradient_accumulation_steps=len(batches),
                num_generations=min(count, AT_ONCE),
                max_steps=WARM_UP + args.repeats,
                **TRL_SETTINGS,
            ),
        )
        trainer.train()
    return {"seconds": clock.seconds[WARM_UP:], "peak_rss_gib": peak_memory_gib(torch.device("cpu"))}


def _batches(count: int, *, length: int, vocab_size: int) -> list[dict[str, torch.Tensor]]:
    """The samples of the other side, as TRL has them after generation."""
    items = make_items(count, length=length, vocab_size=vocab_size)
    ids_BT = torch.from_numpy(np.stack([item.sample.token_ids_T for item in items])).long()
    advantages_B = torch.tensor([item.advantage for item in items])
    cut = length // 2
    return [
        {
            "prompt_ids": ids_BT[start : start + AT_ONCE, :cut],
            "prompt_mask": torch.ones_like(ids_BT[start : start + AT_ONCE, :cut]),
            "completion_ids": ids_BT[start : start + AT_ONCE, cut:],
            "completion_mask": torch.ones_like(ids_BT[start : start + AT_ONCE, cut:]),
            "advantages": advantages_B[start : start + AT_ONCE],
            "num_items_in_batch": torch.tensor(float(count * (length - cut))),
        }
        for start in range(0, count, AT_ONCE)
    ]


def trl_environment(trl: Path) -> dict[str, str]:
    """Return the variables of a process that imports TRL from `trl`, with the allocator settings that the launcher gives a rank."""
    paths = os.pathsep.join(filter(None, [str(trl.absolute()), os.environ.get("PYTHONPATH")]))
    return {**rank_environment(1, num_cpus=os.cpu_count() or 1, is_on_cpu=True), **os.environ, "PYTHONPATH": paths}


def run_side(side: str, tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one side in a process of its own."""
    script = Path(__file__) if side != "ours" else Path(__file__).with_name("training.py")
    words = [f"--{name}={getattr(args, name)}" for name in ("model", "length", "dtype", "repeats")]
    command = [sys.executable, str(script), *words, f"--side={side}", f"--side-tokens={tokens}"]
    wanted = rank_environment(1, num_cpus=os.cpu_count() or 1, is_on_cpu=True)
    environment = {**wanted, **os.environ} if side == "ours" else trl_environment(args.trl)
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure_size(tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure all sides in turns at one size."""
    sides = SIDES[args.dtype]
    rounds = [{side: run_side(side, tokens, args) for side in sides} for _ in range(args.rounds)]
    medians = {side: statistics.median(s for each in rounds for s in each[side]["seconds"]) for side in sides}
    count = max(1, tokens // args.length) * args.length
    found: dict[str, Any] = {"tokens": count}
    for side in sides:
        found[f"{side}_tokens_per_s"] = round(count / medians[side], 1)
        found[f"{side}_peak_rss_gib"] = round(max(each[side]["peak_rss_gib"] for each in rounds), 3)
    for side in sides[1:]:
        found[f"ratio_to_{side}"] = round(medians[side] / medians["ours"], 3)
    return found


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", type=Path, help="where TRL is installed")
    parser.add_argument("--model", required=True, help="a model directory")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192], help="a step's")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", choices=SIDES, default="bfloat16", help="what ours computes in")
    parser.add_argument("--side", choices=SIDES["bfloat16"][1:], help=argparse.SUPPRESS)
    parser.add_argument("--side-tokens", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(measure_trl(args)))
        return
    if args.trl is None or not (args.trl / "trl").is_dir():
        parser.error("--trl names a directory with TRL in it: pip install --target DIRECTORY --no-deps trl==1.16.0")
    sizes = [measure_size(tokens, args) for tokens in args.tokens]
    print(
        json.dumps(
            {
                "benchmark": "beside_trl",
                "dtype": args.dtype,
                **sizes[0],
                "sizes": sizes,
                "config": {"model": args.model} | {key: getattr(args, key) for key in ("length", "repeats", "rounds")},
                "hardware": hardware(),
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
