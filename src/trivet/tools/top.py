"""`trivet top OUTPUT_DIR`: a run at a glance in the terminal: who waits for whom, the newest numbers, short curves, the last error.

Reads what the run wrote and changes nothing. On a terminal it is a screen of `trivet.tools.screens`; else it prints one picture.
"""

import argparse
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from trivet.errors import ConfigError
from trivet.process.process_table import process_exists
from trivet.shown_text import one_line
from trivet.view.metrics import ENTROPY, LOSS, MISMATCH, REWARD, STEP_TIME, THROUGHPUT, MetricKey
from trivet.view.run import ViewedRun, open_run
from trivet.view.status import describe_run, read_status, watch_status
from trivet.wire.status import RunState, RunStatus

_BARS = "▁▂▃▄▅▆▇█"
_CURVES = {
    "reward": REWARD,
    "loss": LOSS,
    "entropy": ENTROPY,
    "mismatch KL": MISMATCH,
    "staleness": MetricKey("orchestrator", "batch/off_policy_level/mean"),
    "tokens/s": THROUGHPUT,
    "step time, s": STEP_TIME,
    "waits for batch, s": MetricKey("trainer", "time/wait_for_batch"),
}
_STYLES = {RunState.DONE: "green", RunState.FAILED: "red", RunState.INTERRUPTED: "yellow", RunState.PREEMPTED: "yellow"}
_ERROR_HEADING = "last error:"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this tool."""
    parser.add_argument("output_dir", type=Path, metavar="OUTPUT_DIR", help="the run's output_dir")
    parser.add_argument(
        "--once", action="store_true", help="print one picture and end; so it is too where the output is no terminal"
    )


def run(arguments: argparse.Namespace) -> int:
    """Show the run until a key ends it; returns the exit code.

    Raises:
        ConfigError: the directory holds no run.
    """
    viewed, console = ViewedRun(open_run(arguments.output_dir), name=arguments.output_dir.name), Console()
    if arguments.once or not (console.is_terminal and sys.stdin.isatty()):
        with suppress(ConfigError):  # the picture shows the error
            watch_status(viewed.layout, viewed.clock)
        console.print(picture(viewed, width=console.width))
        return 0
    # Not at the top: the library of the screens takes a second to import.
    from trivet.tools.screens import RUN, TerminalApp

    app = TerminalApp(arguments.output_dir, first=RUN)
    app.run()
    return app.return_code or 0


def picture(viewed: ViewedRun, *, width: int) -> RenderableType:
    """Return the run as it is now. The last error comes last, because it may be long."""
    viewed.metrics.refresh(list(_CURVES.values()))
    try:
        status = read_status(viewed.layout)
        words = list(describe_run(status, layout=viewed.layout, now=viewed.clock.now(status), is_alive=process_exists))
    except ConfigError as exc:
        status, words = None, [str(exc)]
    head, *lines = map(one_line, words)
    error_at = lines.index(_ERROR_HEADING) if _ERROR_HEADING in lines else len(lines)
    style = "red" if status is None else _STYLES.get(status.state, "cyan")
    return Group(
        Text(head, style=f"bold {style}"),
        _progress(status, width=width),
        *(Text(line) for line in lines[:error_at]),
        _curves(viewed, width=width),
        *(Text(line, style="red") for line in lines[error_at:]),
    )


def sparkline(values: np.ndarray, *, width: int) -> str:
    """Return the values as `width` bars at most, each the mean of its neighbours, scaled from the least to the greatest."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return ""
    means = np.array([part.mean() for part in np.array_split(finite, min(width, len(finite)))])
    low, high = float(means.min()), float(means.max())
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((float(mean) - low) * scale)] for mean in means)


def _progress(status: RunStatus | None, *, width: int) -> RenderableType:
    if status is None or not status.max_steps:
        return Text("")
    step = max((report.step for role in status.roles for report in role.reports), default=0)
    num_bars = max(10, width - 24)
    num_filled = round(num_bars * min(1.0, step / status.max_steps))
    return Text.assemble(
        ("━" * num_filled, "green"), ("━" * (num_bars - num_filled), "dim"), f" {step}/{status.max_steps} steps"
    )


def _curves(viewed: ViewedRun, *, width: int) -> RenderableType:
    table = Table("", "now", "least", "greatest", "all steps", box=None, padding=(0, 1), header_style="dim")
    for label, key in _CURVES.items():
        values = viewed.metrics.values(key)
        if len(values):
            numbers = (f"{value:.4g}" for value in (values[-1], values.min(), values.max()))
            table.add_row(label, *numbers, Text(sparkline(values, width=max(8, width - 60)), style="cyan"))
    return table if table.row_count else Text("no step has ended yet: curves appear with the first", style="dim")
