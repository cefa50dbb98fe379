"""Does a run survive everything? Real processes, the real vLLM, a tiny model, and faults at every point of the step.

Draws a schedule from a seed: kill -9 of each role, each trainer rank, environment workers and the launcher, at named points;
SIGSTOP; truncated and altered weights; lost, doubled and late messages; full disks; clocks that jump. Brings it about, resumes
the run where a user would, and proves afterwards from its history that nothing was lost or done twice, that it reached its last
step, and that no process, port or lock is left. Fails otherwise. About half a minute a fault.

The last line is one JSON object; docs/benchmarks/chaos.json keeps a long run's.

    uv run python scripts/chaos.py --seed 7 --faults 50 [--minutes 60] [--output /tmp/chaos]
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.chaos import ALL_FAULTS, FULL_DISK, ChaosRun, Outcome, draw_schedule, last_step
from support.rl_run import Run
from support.tiny_models import tiny_model_writer


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=60.0, help="give up after this long")
    parser.add_argument("--output", type=Path, help="an empty or new directory; default: a temporary one that is kept")
    parser.add_argument("--small-disk", action="store_true", help="put the run on a 64 MiB tmpfs, to fill it; needs root")
    parser.add_argument("--point", help="only faults whose point starts with this")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # what was started is ended, not left behind
    directory = arguments.output or Path(tempfile.mkdtemp(prefix="trivet-chaos-"))
    directory.mkdir(parents=True, exist_ok=True)
    print(f"output in {directory}", flush=True)
    tiny_model_writer()(directory / "model")
    disk = directory / "run" if arguments.small_disk else None
    known = (*ALL_FAULTS, *FULL_DISK) if disk else ALL_FAULTS
    among = [planned for planned in known if planned.fault.point.startswith(arguments.point or "")]
    schedule = draw_schedule(arguments.seed, num_faults=arguments.faults, among=among)
    with ExitStack() as after:
        if disk is not None:
            disk.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)], check=True)
            after.callback(subprocess.run, ["umount", "--lazy", str(disk)], check=True)
        chaos = ChaosRun(
            run=Run(directory / "run", directory / "model", max_steps=last_step(schedule)),
            schedule=schedule,
            seed=arguments.seed,
            directory=directory,
            timeout_s=arguments.minutes * 60,
            disk=disk,
        )
        outcome = chaos.carry_out()
    print(json.dumps(summarize(outcome, seed=arguments.seed)))


def summarize(outcome: Outcome, *, seed: int) -> dict[str, object]:
    """Return what the benchmark reports of one run."""
    survived, report = outcome.survived, outcome.report
    deadly = [item for item in survived if item.planned.kind.startswith("kill")]
    of_inference = [
        item for item in deadly if item.planned.victim == "inference" or item.planned.fault.point.startswith("reload")
    ]
    of_training = [item for item in deadly if item not in of_inference and item.planned.victim == ""]
    return {
        "bench": "chaos",
        "seed": seed,
        "faults": len(survived),
        "faults_by_kind": dict(sorted(outcome.kinds.items())),
        "faults_by_point": dict(sorted(Counter(item.planned.fault.point for item in survived).items())),
        "steps": report.last_step,
        "steps_done_again": report.voided_steps,
        "launches": outcome.launches,
        "role_starts": report.starts,
        "groups": report.groups.state.dispatched,
        "groups_done_again": report.groups.voided,
        "statements_proven": report.ledger.checks,
        "left_behind": 0,
        "seconds": round(outcome.seconds, 1),
        "training_killed_to_next_step_s": spread([item.next_step_s for item in of_training]),
        "inference_killed_to_serving_s": spread([item.next_load_s for item in of_inference]),
        "schedule": [
            {
                "point": item.planned.fault.point,
                "kind": item.planned.kind,
                "rank": item.planned.fault.rank,
                "step": item.step,
                "next_step_s": rounded(item.next_step_s),
                "next_load_s": rounded(item.next_load_s),
            }
            for item in survived
        ],
    }


def spread(seconds: Sequence[float | None]) -> dict[str, float] | None:
    """Return median and extremes of `seconds`; None without any."""
    known = sorted(value for value in seconds if value is not None)
    if not known:
        return None
    return {"median": round(statistics.median(known), 1), "min": round(known[0], 1), "max": round(known[-1], 1)}


def rounded(seconds: float | None) -> float | None:
    """Return seconds with one decimal; None stays None."""
    return None if seconds is None else round(seconds, 1)


if __name__ == "__main__":
    main()
