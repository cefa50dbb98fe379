"""How should the trainer and the inference server share a machine's cores, so that a step ends soonest?

Each mode is a real `rl` run of `whole_step.py`: a model, reverse-text, completions of one length, one step asynchronous.

- shared: both use all cores at the same priority, as `rl` starts them
- trainer_yields, server_yields: the same, and one of them has a lower priority (nice 10)
- split: each has its own half of the cores
- level_0: nothing is generated while the trainer works, so each has all cores for its part of a step
- level_2: two steps asynchronous, so that neither ever waits for the other's slower steps

    uv run python scripts/bench/division.py --model models/smollm2 [--dtype bfloat16] [--completions 64] [--length 64]
        [--repeats 6] [--rounds 1] [--modes shared split ...]

The modes take turns. Seconds are medians from the end of a step to the end of the next. The last line is one JSON object;
`ratio_to_shared` says how many times as fast a mode is, `cores_busy` how many cores it used on average. A division can gain
only the cores that were not busy, unless it also makes the work itself cheaper.
"""

import argparse
import json
import os
import statistics
from typing import Any

import psutil
import torch
from training import hardware
from whole_step import measure_ours

ROLES = {"trainer": "trivet.trainer", "server": "trivet.inference"}
"""A word by which the command lines of a role's processes are known."""
MODES = ("shared", "trainer_yields", "server_yields", "split", "level_0", "level_2")
LOW_PRIORITY = 10
"""The niceness of a role that yields: about a tenth of the other's share where both want a core."""


def place(process: psutil.Process, mode: str, *, num_cores: int) -> None:
    """Give a process of the trainer or the server the cores or the priority that `mode` means. Others are left alone."""
    words = " ".join(process.cmdline())
    role = next((role for role, word in ROLES.items() if word in words), None)
    if role is None:
        return
    if mode == f"{role}_yields":
        for thread in process.threads():
            os.setpriority(os.PRIO_PROCESS, thread.id, LOW_PRIORITY)
    if mode == "split":
        half = num_cores // 2
        cores = range(half) if role == "trainer" else range(half, num_cores)
        for thread in process.threads():
            os.sched_setaffinity(thread.id, cores)


def measure(mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one run in `mode`."""
    num_cores = os.cpu_count() or 1
    flags = {"--max-async-level": mode.removeprefix("level_")} if mode.startswith("level_") else {}
    return measure_ours(args, flags=flags, prepare=lambda process: place(process, mode, num_cores=num_cores))


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a model directory")
    parser.add_argument("--dtype", default="bfloat16", help="what the trainer computes in")
    parser.add_argument("--completions", type=int, default=64, help="completions of a step")
    parser.add_argument("--length", type=int, default=64, help="tokens of a completion")
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    args = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in args.modes}
    for _ in range(args.rounds):
        for mode in args.modes:
            runs[mode].append(measure(mode, args))
    steps = {mode: statistics.median(s for run in taken for s in run["seconds"]) for mode, taken in runs.items()}
    found = {
        mode: {
            "step_s": round(steps[mode], 3),
            "by_round_s": [round(statistics.median(run["seconds"]), 3) for run in taken],
            "cores_busy": round(statistics.median(run["cores_busy"] for run in taken), 2),
            "parts_s": {part: round(seconds, 3) for part, seconds in taken[-1]["parts"].items()},
        }
        for mode, taken in runs.items()
    }
    ratios = {mode: round(steps["shared"] / step, 3) for mode, step in steps.items()} if "shared" in steps else {}
    config = {name: getattr(args, name) for name in ("model", "dtype", "completions", "length", "repeats", "rounds")}
    print(
        json.dumps(
            {
                "benchmark": "division",
                "modes": found,
                "ratio_to_shared": ratios,
                "config": config,
                "cores": os.cpu_count(),
                "hardware": hardware(),
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
