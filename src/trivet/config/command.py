"""What every command that takes a configuration does around its own work: help, dry run, notices and exit codes."""

import sys
from collections.abc import Callable, Sequence

from trivet.config.load import SectionT, load_config
from trivet.errors import TrivetError


def run_command(kind: type[SectionT], main: Callable[[SectionT], int], argv: Sequence[str] | None = None) -> int:
    """Load a `kind` from the command line and hand it to `main`; returns the process's exit code."""
    try:
        loaded = load_config(kind, sys.argv[1:] if argv is None else argv)
        for notice in loaded.notices:
            print(f"notice: {notice}", file=sys.stderr)
        return main(loaded.config)
    except TrivetError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return exc.exit_code
