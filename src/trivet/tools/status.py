"""`trivet status OUTPUT_DIR`: what a run is doing, or how it ended, in words. Reads what the run wrote and changes nothing."""

import argparse
import sys
from pathlib import Path

import msgspec

from trivet.config.layout import RunLayout
from trivet.process.process_table import process_exists
from trivet.shown_text import printable
from trivet.view.status import StatusClock, describe_run, read_status, watch_status


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this tool."""
    parser.add_argument("output_dir", type=Path, metavar="OUTPUT_DIR", help="the run's output_dir")
    parser.add_argument("--json", action="store_true", help="print the status as the run wrote it")


def run(arguments: argparse.Namespace) -> int:
    """Print the status; returns the exit code.

    Raises:
        ConfigError: the directory holds no run.
    """
    layout = RunLayout(arguments.output_dir)
    if arguments.json:
        status = read_status(layout)
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(status), indent=1).decode() + "\n")
        return 0
    clock = StatusClock()
    status = watch_status(layout, clock)
    for line in describe_run(status, layout=layout, now=clock.now(status), is_alive=process_exists):
        print(printable(line))
    return 0
