"""`trivet compare A B`: whether run B is better than run A, on the same examples at equal rollouts, tokens and seconds."""

import argparse
import sys
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from trivet.errors import ConfigError
from trivet.shown_text import one_line, printable
from trivet.storage.durable import write_atomically
from trivet.view.comparison import EnvironmentComparison, compare_runs, describe_difference, measure_run
from trivet.view.comparison_svg import draw_comparison
from trivet.view.run import open_run

_PIPED_WIDTH = 120
"""Width of a table, in characters, if stdout is not a terminal."""


class ComparisonReport(msgspec.Struct, kw_only=True):
    """The object that `--json` prints."""

    a: list[str]
    b: list[str]
    environments: list[EnvironmentComparison]


def configure_compare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this tool."""
    parser.add_argument("run_a", type=Path, metavar="A", help="output_dir of a run with evaluations")
    parser.add_argument("run_b", type=Path, metavar="B", help="output_dir of another run, evaluated on the same examples")
    parser.add_argument("--more-a", type=Path, nargs="+", default=[], metavar="DIR", help="runs like A with other seeds")
    parser.add_argument("--more-b", type=Path, nargs="+", default=[], metavar="DIR", help="runs like B with other seeds")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the curves; needs runs evaluated on one environment")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run_compare(arguments: argparse.Namespace) -> int:
    """Print the paired differences. Return the exit code."""
    paths_a, paths_b = [arguments.run_a, *arguments.more_a], [arguments.run_b, *arguments.more_b]
    side_a, side_b = ([measure_run(open_run(path)) for path in paths] for paths in (paths_a, paths_b))
    found = compare_runs(side_a, side_b)
    if arguments.svg is not None:
        if len(found) > 1:
            names = ", ".join(one_line(environment.env) for environment in found)
            raise ConfigError(f"--svg draws one environment, and the runs share {len(found)}: {names}")
        picture = draw_comparison(found[0], names=(paths_a[0].name, paths_b[0].name))
        try:
            write_atomically(arguments.svg, picture.encode())
        except OSError as exc:
            raise ConfigError(f"--svg {arguments.svg} cannot be written: {exc.strerror}; choose another file") from exc
    if arguments.json:
        report = ComparisonReport(a=list(map(str, paths_a)), b=list(map(str, paths_b)), environments=found)
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n")
        return 0
    for environment in found:
        _show(environment)
    return 0


def _show(found: EnvironmentComparison) -> None:
    print(f"{one_line(found.env)}, {found.num_examples:,} examples, paired; B minus A")
    table = Table(box=None, pad_edge=False)
    for column in ("at equal", "at", "step A", "step B", "mean A", "mean B", "difference", "95 % interval", "B better on", ""):
        table.add_column(column, justify="left" if column in ("at equal", "") else "right", no_wrap=True)
    for difference in found.differences:
        bounds = "" if difference.interval is None else "{:+.4f} to {:+.4f}".format(*difference.interval)
        table.add_row(
            difference.budget,
            f"{difference.at:,.0f}",
            *(", ".join(map(str, steps)) for steps in (difference.steps_a, difference.steps_b)),
            f"{difference.mean_a:.4f}",
            f"{difference.mean_b:.4f}",
            f"{difference.difference:+.4f}",
            bounds,
            f"{100 * difference.share_better:.0f} %",
            describe_difference(difference),
        )
    (Console() if sys.stdout.isatty() else Console(width=_PIPED_WIDTH)).print(table)
    for note in found.notes:
        print(f"note: {printable(note)}")
