"""`trivet selection OUTPUT_DIR`: how what a run trained differs from what it sampled, and by which cause."""

import argparse
from pathlib import Path

from trivet.cli.reports import describe_interval, print_json, print_table
from trivet.history.selection import measure_selection, read_ended_groups
from trivet.shown_text import one_line, printable
from trivet.view.run import open_run


def configure_selection(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this tool."""
    parser.add_argument("output_dir", type=Path, metavar="OUTPUT_DIR", help="the run's output_dir; the run may be going on")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run_selection(arguments: argparse.Namespace) -> int:
    """Print the bias of each quantity and its causes. Return the exit code."""
    report = measure_selection(read_ended_groups(open_run(arguments.output_dir)))
    if arguments.json:
        print_json(report)
        return 0
    causes = ", ".join(f"{count:.6g} {one_line(cause)}" for cause, count in report.num_groups.items())
    print(f"{sum(report.num_groups.values()):.0f} groups ended: {causes}")
    for bias in report.biases:
        means = f"sampled {bias.sampled_mean:.4g}, trained {bias.trained_mean:.4g}, bias {bias.bias:+.3g}"
        unknown = f"; unknown for {bias.num_unknown} groups" if bias.num_unknown else ""
        print(f"\n{bias.quantity}: {means} (95 % interval {describe_interval(bias.interval)}){unknown}")
        rows = [
            (c.cause, f"{c.num_groups:.6g}", f"{c.mean:.4g}", f"{c.effect:+.3g}", describe_interval(c.interval))
            for c in bias.causes
        ]
        print_table(("cause", "groups", "mean", "adds to the bias", "95 % interval"), rows)
    for warning in report.warnings:
        print(f"warning: {printable(warning)}")
    return 0
