"""Describes what the quickstart achieved, from the files that it left. `trivet quickstart` prints it at the end."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

from trivet.telemetry.metrics import read_metrics

WINDOW = 5
"""Number of steps that are averaged at either end of the run."""


def read_rewards(metrics: Path) -> list[float]:
    """Return the mean reward of each step, in order."""
    by_step = {row["step"]: row["reward/mean"] for row in read_metrics(metrics).rows if "reward/mean" in row}
    return [by_step[step] for step in sorted(by_step)]


def read_evaluations(evals: Path) -> list[dict[str, Any]]:
    """Return the summaries in the order of their steps: the start model first."""
    summaries = [json.loads(path.read_text(encoding="utf-8")) for path in evals.glob("step_*/*/summary.json")]
    return sorted(summaries, key=lambda summary: summary["step"])


def read_answers(evals: Path, step: int, *, count: int) -> list[tuple[str, str, float]]:
    """Return text, answer and reward of the first `count` examples under policy `step`."""
    [results] = evals.glob(f"step_{step}/*/results.jsonl")
    rows = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()[:count]]
    return [(row["prompt"][-1]["content"], row["completion"][-1]["content"], row["reward"]) for row in rows]


def report(output: Path) -> str:
    """Return rewards, scores and answers before and after the training, and where the files are.

    Args:
        output: the output directory of the quickstart, which holds `run/` and `sft/`.
    """
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
    lines += ["", *(f"{name:20} {place}" for name, place in places.items())]
    if num_damaged := read_metrics(run / "metrics" / "orchestrator.jsonl").num_damaged:
        lines.append(f"{num_damaged} damaged lines of {run / 'metrics' / 'orchestrator.jsonl'} were skipped")
    return "\n".join(lines)
