"""`trivet selection OUTPUT_DIR`: how what a run trained differs from what it sampled, and by which cause."""

import argparse
import sys
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from trivet.history.selection import QuantityBias, SelectionReport, measure_selection, read_ended_groups
from trivet.shown_text import one_line, printable
from trivet.view.run import open_run

_PIPED_WIDTH = 120
"""Width of a table, in characters, if stdout is not a terminal."""


def configure_selection(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this tool."""
    parser.add_argument("output_dir", type=Path, metavar="OUTPUT_DIR", help="the run's output_dir; the run may be going on")
    parser.add_argument("--env", metavar="NAME", help="groups of this environment alone; default: all")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run_selection(arguments: argparse.Namespace) -> int:
    """Print the bias of each quantity and its causes. Return the exit code."""
    groups = read_ended_groups(open_run(arguments.output_dir))
    report = measure_selection([group for group in groups if arguments.env in (None, group.env)])
    if arguments.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n")
        return 0
    _show(report)
    return 0


def _show(report: SelectionReport) -> None:
    total = sum(report.num_groups.values())
    print(f"{total:,} groups ended: " + ", ".join(f"{count:,} {one_line(cause)}" for cause, count in report.num_groups.items()))
    console = Console() if sys.stdout.isatty() else Console(width=_PIPED_WIDTH)
    for bias in report.biases:
        means = f"sampled {bias.sampled_mean:.4g}, trained {bias.trained_mean:.4g}, bias {bias.bias:+.3g}"
        print(f"\n{bias.quantity}: {means}{_describe(bias.interval)}")
        console.print(_draw(bias))
    for warning in report.warnings:
        print(f"warning: {printable(warning)}")
    for note in report.notes:
        print(f"note: {printable(note)}")


def _draw(bias: QuantityBias) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("cause", "groups", "mean", "adds to the bias", "95 % interval"):
        table.add_column(column, justify="left" if column == "cause" else "right", no_wrap=True)
    for cause in bias.causes:
        effect = "" if cause.effect is None else f"{cause.effect:+.3g}"
        bounds = "" if cause.interval is None else f"{cause.interval[0]:+.3g} to {cause.interval[1]:+.3g}"
        table.add_row(one_line(cause.cause), f"{cause.num_groups:,.4g}", f"{cause.mean:.4g}", effect, bounds)
    return table


def _describe(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f" (95 % interval {interval[0]:+.3g} to {interval[1]:+.3g})"
