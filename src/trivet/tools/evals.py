"""`trivet evals DIR`: the evaluations in a directory, in the terminal: scores, conversations, two policies side by side.

Reads what evaluations wrote and changes nothing. Where the output or the input is no terminal, it prints the list and ends.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trivet.shown_text import one_line
from trivet.view.evaluations import FoundEvaluation, find_evaluations

COLUMNS = ("policy", "environment", "mean reward", "± (95 %)", "pass@k", "k", "examples", "failed")
_PIPED_WIDTH = 10_000
"""Columns of a table that no terminal cuts: no name is longer."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this tool."""
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="a run's output_dir, or the directory of one evaluation or of several"
    )


def run(arguments: argparse.Namespace) -> int:
    """Browse the evaluations until a key ends it, or print their list; returns the exit code.

    Raises:
        ConfigError: the directory holds no evaluation.
    """
    found = find_evaluations(arguments.directory)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        Console(width=_PIPED_WIDTH).print(make_list(found))
        return 0
    # Not at the top: the library of the screens takes a second to import.
    from trivet.tools.screens import EVALUATIONS, TerminalApp

    app = TerminalApp(arguments.directory, first=EVALUATIONS)
    app.run()
    return app.return_code or 0


def make_list(found: Sequence[FoundEvaluation]) -> Table:
    """Return a table with a line for each evaluation."""
    table = Table(box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, no_wrap=True)
    for evaluation in found:
        table.add_row(*map(Text, cells_of(evaluation)))
    return table


def cells_of(evaluation: FoundEvaluation) -> tuple[str, ...]:
    """Return the texts of an evaluation for `COLUMNS`, safe to show."""
    names = (one_line(evaluation.policy), one_line(evaluation.name))
    summary = evaluation.summary
    if summary is None:
        state = f"unreadable: {evaluation.fault}" if evaluation.fault else "goes on"
        return (*names, one_line(state), *[""] * (len(COLUMNS) - 3))
    return (
        *names,
        _number(summary.avg),
        _number(summary.ci95),
        _number(summary.pass_at_k),
        str(summary.rollouts_per_example),
        str(summary.num_examples),
        str(summary.num_failed),
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
