"""Reads what a finished run achieved from its metrics: reward by step, step time, throughput, mismatch, memory.

The last line is one JSON object; docs/benchmarks/ keeps those of the runs that the documentation speaks of.

    uv run python scripts/run_record.py outputs/smollm2
"""

import argparse
import json
import platform
import statistics
from pathlib import Path

from trivet.config.layout import RunLayout

WINDOW = 5
"""Steps averaged at either end."""


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """Return metrics by step; of a step written twice, the later line counts."""
    rows = map(json.loads, path.read_text().splitlines())
    return {int(row["step"]): row for row in rows}


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output_dir", type=Path)
    layout = RunLayout(parser.parse_args().output_dir)
    orchestrator = read_metrics(layout.metrics / "orchestrator.jsonl")
    trainer = read_metrics(layout.metrics / "trainer.jsonl")
    rewards = [orchestrator[step]["reward/mean"] for step in sorted(orchestrator)]
    settled = sorted(trainer)[2:] or sorted(trainer)
    result = {
        "bench": "run",
        "steps": len(rewards),
        "reward_first": round(statistics.mean(rewards[:WINDOW]), 4),
        "reward_last": round(statistics.mean(rewards[-WINDOW:]), 4),
        "rewards": [round(reward, 4) for reward in rewards],
        "mismatch_kl": [float(f"{trainer[step]['mismatch_kl/mean']:.3g}") for step in sorted(trainer)],
        "step_s": round(statistics.median(trainer[step]["time/step"] for step in settled), 2),
        "tokens_per_s": round(statistics.median(trainer[step]["perf/throughput"] for step in settled), 1),
        "peak_rss_gib": round(max(row["perf/peak_memory"] for row in trainer.values()), 2),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
