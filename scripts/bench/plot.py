"""Draws a record of docs/benchmarks as a picture beside it.

    uv run python scripts/bench/plot.py docs/benchmarks/growth_*.json

A table of `growth.py` becomes its measured quantity over its size, both logarithmic, with the limit dashed.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

AXES = {
    "growth_tokens": ("tokens", "step_s", "tokens of a step", "seconds of a step"),
    "growth_sizes": ("parameters", "step_s", "parameters", "seconds of a step"),
    "growth_ranks": ("ranks", "step_s", "ranks", "seconds of a step"),
    "growth_in_flight": ("in_flight", "rollouts_per_s", "rollouts in flight", "rollouts a second"),
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


def main() -> None:
    """Draw every file that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path)
    for path in parser.parse_args().records:
        record = json.loads(path.read_text())
        if record["benchmark"] in AXES:
            draw(record, path.with_suffix(".png"))
            print(path.with_suffix(".png"))


if __name__ == "__main__":
    main()
