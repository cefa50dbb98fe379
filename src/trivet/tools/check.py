"""`trivet check OUTPUT_DIR`: proves from what a run left behind that it kept its promises. Reads, and changes nothing."""

import argparse
from pathlib import Path

from trivet.config.layout import RunLayout
from trivet.history.check import check_run
from trivet.history.describe_report import describe_report
from trivet.shown_text import printable


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output_dir", type=Path, metavar="OUTPUT_DIR", help="the run's output_dir; the run may be going on")


def run(arguments: argparse.Namespace) -> int:
    """Exit code: 0 proven, 1 broken.

    Raises:
        ConfigError: the directory holds no run.
        HistoryError: its events.jsonl cannot be read.
    """
    layout = RunLayout(arguments.output_dir)
    report = check_run(layout)
    print(printable(describe_report(report, events=layout.events)))
    return 1 if report.breaches else 0
