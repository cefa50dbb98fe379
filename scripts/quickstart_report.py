"""Prints what the quickstart achieved, from the files that the run left: `python scripts/quickstart_report.py OUTPUT_DIR`."""

import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

WINDOW = 5
"""Steps averaged at either end of the run."""


def read_rewards(metrics: Path) -> list[float]:
    """Mean reward of each step, in order."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    by_step = {row["step"]: row["reward/mean"] for row in rows if "reward/mean" in row}
    return [by_step[step] for step in sorted(by_step)]


def read_evaluations(evals: Path) -> list[dict[str, Any]]:
    """Summaries in the order of their steps: the start model first."""
    summaries = [json.loads(path.read_text(encoding="utf-8")) for path in evals.glob("step_*/*/summary.json")]
    return sorted(summaries, key=lambda summary: summary["step"])


def read_answers(evals: Path, step: int, *, count: int) -> list[tuple[str, str, float]]:
    """The first examples' text, answer and reward under policy `step`."""
    [results] = evals.glob(f"step_{step}/*/results.jsonl")
    rows = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()[:count]]
    return [(row["prompt"][-1]["content"], row["completion"][-1]["content"], row["reward"]) for row in rows]


def report(output: Path) -> str:
    run = output / "run"
    rewards = read_rewards(run / "metrics" / "orchestrator.jsonl")
    before, after = read_evaluations(run / "evals")
    lines = [
        "",
        f"{'':34}{'before':>10}{'after':>10}",
        f"{f'reward, first and last {WINDOW} steps':34}{mean(rewards[:WINDOW]):10.3f}{mean(rewards[-WINDOW:]):10.3f}",
        f"{'reward on held-out texts':34}{before['avg']:10.3f}{after['avg']:10.3f}",
        f"{'held-out texts reversed perfectly':34}{before['pass_at_k']:10.0%}{after['pass_at_k']:10.0%}",
        "",
    ]
    for label, step in (("start", 0), ("trained", after["step"])):
        lines.append(f"the {label} model answers:")
        lines += [
            f"  {text:10} -> {answer:48} reward {reward:.2f}"
            for text, answer, reward in read_answers(run / "evals", step, count=3)
        ]
    weights = run / "weights" / f"step_{after['step']}"
    places = {
        "trained model": weights,
        "rewards and losses": run / "metrics",
        "what was sampled": run / "rollouts",
        "evaluations": run / "evals",
        "logs": run / "logs",
        "start model": output / "sft" / "weights",
    }
    return "\n".join([*lines, "", *(f"{name:20} {place}" for name, place in places.items())])


if __name__ == "__main__":
    print(report(Path(sys.argv[1])))
