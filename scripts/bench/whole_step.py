"""How long does a whole step take, generation and training, next to TRL's GRPO trainer on the same machine?

Both sides train the same model on the same prompts (reverse-text), with the same number of completions, all of one length: no
side stops early. Ours is a real `rl` run: vLLM, orchestrator and trainer, one step asynchronous, as configs/smollm2/rl.toml has
it. TRL's is its own loop with its fastest settings on a CPU: generation of all completions at once by transformers, training of
32 at a time, no gradient checkpointing, "medium" precision of float32 products.

    pip install --target DIRECTORY --no-deps trl==1.16.0
    uv run python scripts/bench/whole_step.py --trl DIRECTORY --model models/smollm2 [--dtype float32] [--completions 64]
        [--length 64] [--repeats 5] [--rounds 1] [--at-once 32]

The sides take turns, each in processes of its own. Seconds are from the end of a step to the end of the next, medians over all
repeats after the warm-up. The last line is one JSON object. `trl_*` is TRL with float32 weights, `trl_bfloat16_*` with bfloat16
weights and moments, which lose small updates; `ratio_to_*` is tokens trained a second, ours over TRL's. `ours_limit_s` is what
our step's products take at the rate of large matrix products, which is measured between the sides.

`*_cpu_s` are the processor's seconds of a step, over all processes, `cpu_ratio_to_*` the tokens trained in one of them, and
`ours_limit_cpu_s` those of the products. On a machine with other work these say more than seconds, which then depend on that work.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
import verifiers as vf
from training import hardware, matmul_flops
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from reverse_text import plain_reversal_reward
from trivet.config.layout import RunLayout
from trivet.launcher.plan import rank_environment
from trivet.trainer.measurement.performance import peak_memory_gib

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs/smollm2/rl.toml"
TASK = {"needs_tags": False, "min_length": 5, "max_length": 12}
"""The arguments of reverse-text in `CONFIG`."""
GROUP_SIZE = 8
WARM_UP = 3
"""Steps before a run's own rhythm: the first batches are generated while nothing is trained."""
TRL_WARM_UP = 1
"""Its steps are all alike after the first."""
TIMEOUT_S = 3600
POLL_INTERVAL_S = 0.2
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
"""Settings of TRL: the loss and the update of ours, on a CPU, with nothing written."""


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


def trl_environment(trl: Path) -> dict[str, str]:
    """Return the variables of a process that imports TRL from `trl`, with the allocator settings that the launcher gives a rank."""
    paths = os.pathsep.join(filter(None, [str(trl.absolute()), os.environ.get("PYTHONPATH")]))
    return {**rank_environment(1, num_cpus=os.cpu_count() or 1, is_on_cpu=True), **os.environ, "PYTHONPATH": paths}


def measure_trl(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the seconds of each step of TRL's loop, and of its generation, in a process of its own."""
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[reportMissingImports]  it is nowhere but in --trl

    torch.set_float32_matmul_precision("medium")
    environment = vf.load_environment("reverse-text", **TASK)
    dataset = environment.get_dataset().select_columns(["prompt", "answer"])
    generation_s: list[float] = []
    num_tokens: list[int] = []

    class Trainer(GRPOTrainer):
        """Measures the time of generation."""

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            started = time.perf_counter()
            made = super()._generate_and_score_completions(inputs)
            generation_s.append(time.perf_counter() - started)
            num_tokens.append(int(made["prompt_mask"].sum() + made["completion_mask"].sum()))
            return made

    clock = Clock()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Trainer(
            model=AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.side.removeprefix("trl_"))),
            processing_class=AutoTokenizer.from_pretrained(args.model),
            reward_funcs=lambda completions, answer, **_: list(map(plain_reversal_reward, completions, answer)),
            train_dataset=dataset,
            callbacks=[clock],
            args=GRPOConfig(
                output_dir=scratch,
                per_device_train_batch_size=min(args.completions, args.at_once),
                gradient_accumulation_steps=max(1, args.completions // args.at_once),
                num_generations=GROUP_SIZE,
                max_completion_length=args.length,
                generation_kwargs={"min_new_tokens": args.length},
                max_steps=TRL_WARM_UP + args.repeats,
                **TRL_SETTINGS,
            ),
        )
        started, cpu_started = time.perf_counter(), time.process_time()
        trainer.train()
        busy = (time.process_time() - cpu_started) / (time.perf_counter() - started)
    return {
        "seconds": clock.seconds[TRL_WARM_UP:],
        "parts": {"generation": statistics.median(generation_s[TRL_WARM_UP:])},
        "tokens": statistics.median(num_tokens[TRL_WARM_UP:]),
        "cores_busy": busy,
        "cpu_s": busy * statistics.mean(clock.seconds),
        "peak_rss_gib": peak_memory_gib(torch.device("cpu")),
    }


def measure_ours(
    args: argparse.Namespace,
    *,
    flags: Mapping[str, str] | None = None,
    prepare: Callable[[psutil.Process], None] = lambda process: None,
) -> dict[str, Any]:
    """Start a run as a user does; return seconds from one trained step to the next, and what the trainer says of them.

    Args:
        flags: further flags of `rl`, with their values.
        prepare: called with every process of the run soon after it started.
    """
    with tempfile.TemporaryDirectory() as scratch:
        layout = RunLayout(Path(scratch) / "run")
        given = {
            "--output-dir": layout.root,
            "--max-steps": WARM_UP + args.repeats,
            "--model.name": Path(args.model).absolute(),
            "--trainer.model.compute-dtype": args.dtype,
            "--trainer.optim.lr": 1e-6,
            "--ckpt.interval": 10_000,
            "--orchestrator.batch-size": args.completions,
            "--orchestrator.rollouts-per-example": GROUP_SIZE,
            "--orchestrator.sampling.max-tokens": args.length,
            "--orchestrator.sampling.extra-body": '{"ignore_eos": true}',
        }
        metrics = layout.metrics / "trainer.jsonl"
        words = [str(word) for pair in {**given, **(flags or {})}.items() for word in pair]
        command = [sys.executable, "-m", "trivet.launcher.commands.rl", "@", str(CONFIG), *words]
        run = psutil.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        marks = _watch(run, metrics, prepare)
        if run.returncode:
            raise RuntimeError(f"the run ended with {run.returncode}: start it by hand to see why: {' '.join(command)}")
        steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    measured = steps[WARM_UP:]
    # the last polls see processes end, and with them their times
    first, last = marks[0], max(marks, key=lambda mark: mark[1])
    usage = {"cores_busy": (last[1] - first[1]) / (last[0] - first[0]), "peak_rss_gib": marks[-1][2] / 2**30}
    parts = ("wait_for_batch", "forward_backward", "optimizer", "wait_for_policy")
    seconds = [later["time"] - earlier["time"] for earlier, later in zip(steps[WARM_UP - 1 :], measured, strict=False)]
    return usage | {
        "seconds": seconds,
        "cpu_s": usage["cores_busy"] * statistics.mean(seconds),
        "parts": {part: statistics.median(step.get(f"time/{part}", 0.0) for step in measured) for part in parts},
        "tokens": statistics.median(step["perf/throughput"] * step["time/step"] for step in measured),
        "flops": count_flops(args, computed_tokens=statistics.median(step["perf/computed_tokens"] for step in measured)),
    }


def count_flops(args: argparse.Namespace, *, computed_tokens: float) -> float:
    """Count the operations of the products of a whole step, without attention.

    The trainer computes `computed_tokens` forward and backward, and the head for the completions' tokens alone; the server
    computes these once more. Prompts that the server computes are left out.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model))
    head = model.get_output_embeddings().weight.numel()
    is_tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    body = model.num_parameters() - (head if is_tied else 2 * head)
    generated = args.completions * args.length
    return 6 * body * computed_tokens + 6 * head * generated + 2 * (body + head) * generated


def _watch(run: psutil.Popen, metrics: Path, prepare: Callable[[psutil.Process], None]) -> list[tuple[float, float, int]]:
    """Measure, until the run ends, its processes after the warm-up: the moment, their CPU seconds, and their most bytes of memory.

    A page that several processes share is counted once for each.
    """
    marks: list[tuple[float, float, int]] = []
    prepared: dict[int, list[str]] = {}
    peak, deadline = 0, time.monotonic() + TIMEOUT_S
    while run.poll() is None:
        if time.monotonic() > deadline:
            run.terminate()
            raise TimeoutError(f"the run did not end within {TIMEOUT_S} s")
        cpu_s, rss = 0.0, 0
        for process in [run, *run.children(recursive=True)]:
            try:
                if prepared.get(process.pid) != (command := process.cmdline()):
                    prepare(process)
                    prepared[process.pid] = command
                times = process.cpu_times()
                cpu_s, rss = cpu_s + times.user + times.system, rss + process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        peak = max(peak, rss)
        if metrics.exists() and len(metrics.read_bytes().splitlines()) >= WARM_UP:
            marks.append((time.perf_counter(), cpu_s, peak))
        time.sleep(POLL_INTERVAL_S)
    return marks


def measure_side(side: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one side in a process of its own."""
    if side == "ours":
        return measure_ours(args)
    names = ("model", "dtype", "completions", "length", "repeats", "at_once")
    words = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in names]
    command = [sys.executable, __file__, *words, f"--side={side}"]
    done = subprocess.run(command, env=trl_environment(args.trl), check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", type=Path, help="where TRL is installed")
    parser.add_argument("--model", required=True, help="a model directory")
    parser.add_argument("--dtype", choices=SIDES, default="bfloat16", help="what ours computes in")
    parser.add_argument("--completions", type=int, default=64, help=f"of a step, in groups of {GROUP_SIZE}")
    parser.add_argument("--length", type=int, default=64, help="tokens of a completion")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=32, help="samples of a device batch of TRL's; fewer need less memory")
    parser.add_argument("--side", choices=SIDES["bfloat16"][1:], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(measure_trl(args)))
        return
    if args.trl is None or not (args.trl / "trl").is_dir():
        parser.error("--trl names a directory with TRL in it: pip install --target DIRECTORY --no-deps trl==1.16.0")
    sides = SIDES[args.dtype]
    rounds, rates, cpu_rates = [], [], []
    for _ in range(args.rounds):
        taken = {}
        for side in sides:
            rates.append(matmul_flops(getattr(torch, args.dtype), torch.device("cpu")))
            cpu_rates.append(matmul_flops(getattr(torch, args.dtype), torch.device("cpu"), clock=time.process_time))
            taken[side] = measure_side(side, args)
        rounds.append(taken)
    rate = statistics.median(rates)
    medians = {side: statistics.median(s for each in rounds for s in each[side]["seconds"]) for side in sides}
    found: dict[str, Any] = {}
    for side in sides:
        last = rounds[-1][side]
        found |= {
            f"{side}_step_s": round(medians[side], 3),
            f"{side}_spread_s": round(max(last["seconds"]) - min(last["seconds"]), 3),
            f"{side}_parts_s": {part: round(seconds, 3) for part, seconds in last["parts"].items()},
            f"{side}_tokens_per_s": round(last["tokens"] / medians[side], 1),
            f"{side}_cores_busy": round(last["cores_busy"], 2),
            f"{side}_cpu_s": round(statistics.median(each[side]["cpu_s"] for each in rounds), 2),
            f"{side}_peak_rss_gib": round(max(each[side]["peak_rss_gib"] for each in rounds), 2),
        }
    ratios = {f"ratio_to_{side}": round(found["ours_tokens_per_s"] / found[f"{side}_tokens_per_s"], 3) for side in sides[1:]}
    for side in sides[1:]:
        ours, theirs = (rounds[-1][name]["tokens"] / found[f"{name}_cpu_s"] for name in ("ours", side))
        ratios[f"cpu_ratio_to_{side}"] = round(ours / theirs, 3)
    found = {key.replace("trl_float32", "trl"): value for key, value in (found | ratios).items()}
    found |= {"ours_limit_s": round(rounds[-1]["ours"]["flops"] / rate, 3), "matmul_tflops": round(rate / 1e12, 3)}
    found["ours_limit_cpu_s"] = round(rounds[-1]["ours"]["flops"] / statistics.median(cpu_rates), 3)
    config = {key: getattr(args, key) for key in ("model", "completions", "length", "repeats", "rounds", "at_once")}
    print(
        json.dumps(
            {
                "benchmark": "whole_step",
                "dtype": args.dtype,
                **found,
                "tokens": rounds[-1]["ours"]["tokens"],
                "config": config,
                "cores": os.cpu_count(),
                "hardware": hardware(),
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
