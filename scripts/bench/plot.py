"""Draws a record of docs/benchmarks as a picture beside it.

    uv run python scripts/bench/plot.py docs/benchmarks/growth_*.json docs/benchmarks/learning.json

A table of `growth.py` becomes its measured quantity over its size, both logarithmic, with the limit dashed. The record of
`learning.py` becomes the reward of each side over rollouts and over seconds: the mean over seeds, and their range; over the mean
seconds of the seeds that have any. The record of `cluster.py` becomes a bar for each of its rows: what the time went into.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")

from matplotlib import pyplot as plt

WINDOW = 3
"""Steps that a point of a learning curve averages."""
AXES = {
    "growth_tokens": ("tokens", "step_s", "tokens of a step", "seconds of a step"),
    "growth_sizes": ("parameters", "step_s", "parameters", "seconds of a step"),
    "growth_ranks": ("ranks", "step_s", "ranks", "seconds of a step"),
    "growth_in_flight": ("in_flight", "rollouts_per_s", "rollouts in flight", "rollouts a second"),
    "growth_hours": ("hours", "rss_mib", "hours at ten rollouts a second", "MiB of the orchestrator"),
    "growth_groups": ("groups", "seconds", "groups of the history", "seconds of trivet check"),
    "growth_resume": ("checkpoint_mib", "resumed_s", "MiB of a checkpoint", "seconds to the first step after a resume"),
}
"""The keys of a row that are drawn, and their names."""


def draw(record: dict[str, Any], file: Path) -> None:
    """Draw a table of growth."""
    x, y, x_name, y_name = AXES[record["benchmark"]]
    rows = record["rows"]
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.plot([row[x] for row in rows], [row[y] for row in rows], marker="o", label="measured")
    if "limit" in rows[0]:
        axes.plot([row[x] for row in rows], [row["limit"] for row in rows], linestyle="--", color="gray", label="limit")
    axes.set(xlabel=x_name, ylabel=y_name, xscale="log", yscale="log")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def draw_learning(record: dict[str, Any], file: Path) -> None:
    """Draw the reward of every side over rollouts, and over seconds if any run was timed."""
    names = ["rollouts"]
    if any(run["seconds"] for run in record["runs"]):
        names.append("seconds since the first step began")
    figure, (panels,) = plt.subplots(
        1, len(names), figsize=(5.5 * len(names), 4.5), sharey=True, squeeze=False, layout="constrained"
    )
    per_step = record["config"]["completions"]
    for index, side in enumerate(dict.fromkeys(run["side"] for run in record["runs"])):
        runs = [run for run in record["runs"] if run["side"] == side]
        rewards_RS = np.array([_smooth(run["rewards"]) for run in runs])
        curves = [(panels[0], per_step * np.arange(1, rewards_RS.shape[1] + 1))]
        if timed := [run["seconds"] for run in runs if run["seconds"]]:
            curves.append((panels[1], np.array(timed).mean(axis=0)))
        for axes, x_S in curves:
            color = f"C{index}"  # one for each side, the same in both panels
            axes.plot(x_S, rewards_RS.mean(axis=0), color=color, label=f"{side} ({len(runs)} seed{'s' * (len(runs) > 1)})")
            axes.fill_between(x_S, rewards_RS.min(axis=0), rewards_RS.max(axis=0), alpha=0.15, color=color)
    for axes, name in zip(panels, names, strict=True):
        axes.set(xlabel=name)
        axes.grid(visible=True, alpha=0.3)
    panels[0].set(ylabel=f"reward, mean of {WINDOW} steps")
    panels[0].legend()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def draw_cluster(record: dict[str, Any], file: Path) -> None:
    """Draw what the time of each simulated run went into, in the order of the work."""
    rows = record["ettr"]
    names = ["steps", *sorted({name for row in rows.values() for name in row["time_shares"]} - {"steps"})]
    figure, axes = plt.subplots(figsize=(9, 0.5 * len(rows) + 1.5), layout="constrained")
    left = np.zeros(len(rows))
    labels = [name.replace(", ", "\n", 1) for name in rows]
    for name in names:
        shares = np.array([row["time_shares"].get(name, 0.0) for row in rows.values()])
        axes.barh(labels, shares, left=left, label=name)
        left += shares
    limits = [row["limit"] for row in rows.values()]
    axes.plot(limits, labels, linestyle="none", marker="|", markersize=22, color="black", label="limit")
    axes.invert_yaxis()
    axes.set(xlabel="share of the time", xlim=(0, 1))
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _smooth(rewards: list[float]) -> list[float]:
    return [sum(rewards[max(0, i - WINDOW + 1) : i + 1]) / min(i + 1, WINDOW) for i in range(len(rewards))]


def main() -> None:
    """Draw every file that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path)
    arguments = parser.parse_args()
    for path in arguments.records:
        record = json.loads(path.read_text())
        if record["benchmark"] == "learning":
            draw_learning(record, path.with_suffix(".png"))
        elif record["benchmark"] == "cluster":
            draw_cluster(record, path.with_suffix(".png"))
        elif record["benchmark"] in AXES:
            draw(record, path.with_suffix(".png"))
        else:
            parser.error(f"{path} is no record of growth.py, learning.py or cluster.py")
        print(path.with_suffix(".png"))


if __name__ == "__main__":
    main()
