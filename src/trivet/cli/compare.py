"""`trivet compare A B`: whether run B is better than run A, on the same examples at equal rollouts, tokens and seconds."""

import argparse
from pathlib import Path

from trivet.cli.reports import describe_interval, print_json, print_table
from trivet.shown_text import one_line
from trivet.view.comparison import BUDGETS, EnvironmentComparison, compare_runs, measure_run
from trivet.view.picture import Panel, write_picture
from trivet.view.run import open_run


def configure_compare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this tool."""
    parser.add_argument("run_a", type=Path, metavar="A", help="output_dir of a run with evaluations")
    parser.add_argument("run_b", type=Path, metavar="B", help="output_dir of another run, evaluated on the same examples")
    parser.add_argument("--more-a", type=Path, nargs="+", default=[], metavar="DIR", help="runs like A with other seeds")
    parser.add_argument("--more-b", type=Path, nargs="+", default=[], metavar="DIR", help="runs like B with other seeds")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the curves")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run_compare(arguments: argparse.Namespace) -> int:
    """Print the paired differences. Return the exit code."""
    paths_a, paths_b = [arguments.run_a, *arguments.more_a], [arguments.run_b, *arguments.more_b]
    found = compare_runs(*([measure_run(open_run(path)) for path in paths] for paths in (paths_a, paths_b)))
    if arguments.svg is not None:
        names = f"A: {paths_a[0].name}", f"B: {paths_b[0].name}"
        write_picture(arguments.svg, "mean reward", [panel for env in found for panel in _make_panels(env, names)])
    if arguments.json:
        print_json({"a": list(map(str, paths_a)), "b": list(map(str, paths_b)), "environments": found})
        return 0
    for environment in found:
        print(f"{one_line(environment.env)}, {environment.num_examples:,} examples, paired; B minus A")
        rows = [
            (
                d.budget,
                d.verdict,
                f"{d.at:,.0f}",
                *(", ".join(map(str, steps)) for steps in (d.steps_a, d.steps_b)),
                *(f"{mean:.4f}" for mean in (d.mean_a, d.mean_b)),
                f"{d.difference:+.4f}",
                describe_interval(d.interval),
                f"{d.share_better:.0%}",
            )
            for d in environment.differences
        ]
        columns = ("at equal", "", "at", "step A", "step B", "mean A", "mean B", "difference", "95 % interval", "B better on")
        print_table(columns, rows, num_texts=2)
    if min(len(paths_a), len(paths_b)) < 2:
        print("note: one seed on a side: its interval covers the choice of examples, and not what another seed would give")
    return 0


def _make_panels(found: EnvironmentComparison, names: tuple[str, str]) -> list[Panel]:
    sides = dict(zip(names, (found.curves_a, found.curves_b), strict=True))
    return [
        Panel(
            across=f"{budget}, {found.env}",
            curves={
                name: [[(point.costs[budget], point.mean) for point in curve] for curve in curves]
                for name, curves in sides.items()
            },
        )
        for budget in BUDGETS
    ]
