"""Prints the report of a tool: one JSON object for programs, or a table for people."""

import sys
from collections.abc import Iterable, Sequence

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trivet.shown_text import one_line

_PIPED_WIDTH = 10_000
"""Width, in characters, of a table that goes to a file or a pipe: wide enough that nothing is cut."""


def print_json(report: object) -> None:
    """Print `report` as JSON."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, num_texts: int = 1) -> None:
    """Print a table. Cells may hold text that others wrote.

    Args:
        num_texts: number of columns at the left that hold text; the others hold numbers, which are aligned at the right.
    """
    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < num_texts else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(one_line(cell)) for cell in row))
    (Console() if sys.stdout.isatty() else Console(width=_PIPED_WIDTH)).print(table)


def describe_interval(interval: tuple[float, float]) -> str:
    """Return the bounds as text, with their signs."""
    return f"{interval[0]:+.3g} to {interval[1]:+.3g}"
