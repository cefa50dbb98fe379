"""`trivet top OUTPUT_DIR`: a run at a glance in the terminal: who waits for whom, the newest numbers, short curves, the last error.

Reads what the run wrote and changes nothing. Ends with q or Ctrl-C.
"""

import argparse
import os
import select
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from trivet.errors import ConfigError
from trivet.process.process_table import process_exists
from trivet.shown_text import one_line
from trivet.view.metrics import ENTROPY, LOSS, MISMATCH, REWARD, STEP_TIME, THROUGHPUT, MetricKey
from trivet.view.run import ViewedRun, open_run
from trivet.view.status import describe_run, read_status, watch_status
from trivet.wire.status import RunState, RunStatus

_INTERVAL_S = 1.0
_BARS = "▁▂▃▄▅▆▇█"
_SHOWN = {
    "reward": REWARD,
    "loss": LOSS,
    "entropy": ENTROPY,
    "mismatch KL": MISMATCH,
    "staleness": MetricKey("orchestrator", "batch/off_policy_level/mean"),
    "tokens/s": THROUGHPUT,
    "step time, s": STEP_TIME,
    "waits for batch, s": MetricKey("trainer", "time/wait_for_batch"),
}
_QUEUES = {
    "groups ready": MetricKey("orchestrator", "batch/ready_groups"),
    "in flight": MetricKey("orchestrator", "batch/inflight_groups"),
    "failed share": MetricKey("orchestrator", "error/mean"),
    "requests running": MetricKey("orchestrator", "concurrency/running"),
    "requests waiting": MetricKey("orchestrator", "concurrency/waiting"),
}
_STYLES = {RunState.DONE: "green", RunState.FAILED: "red", RunState.INTERRUPTED: "yellow", RunState.PREEMPTED: "yellow"}
_ERROR_LINES = 8


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
    viewed = ViewedRun(open_run(arguments.output_dir), name=arguments.output_dir.name)
    console = Console()
    if arguments.once or not (console.is_terminal and sys.stdin.isatty()):
        with suppress(ConfigError):  # the picture shows the error
            watch_status(viewed.layout, viewed.clock)
        console.print(picture(viewed, width=console.width))
        return 0
    # By way of an exception, so that the terminal is restored.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with reading_keys() as has_ended:
        live = Live(console=console, screen=True, auto_refresh=False)
        with live:
            while True:
                live.update(picture(viewed, width=console.width, height=shutil.get_terminal_size().lines), refresh=True)
                if has_ended(_INTERVAL_S):
                    return 0


def picture(viewed: ViewedRun, *, width: int, height: int | None = None) -> RenderableType:
    """Return one frame.

    Args:
        height: lines of the terminal; the last error is cut to what is left of them.
    """
    viewed.metrics.refresh([*_SHOWN.values(), *_QUEUES.values()])
    try:
        status = read_status(viewed.layout)
        words = list(describe_run(status, layout=viewed.layout, now=viewed.clock.now(status), is_alive=process_exists))
    except ConfigError as exc:
        status, words = None, [str(exc)]
    head, *lines = [one_line(line) for line in words if not line.startswith("last error:")]
    error = [one_line(line) for line in status.last_error.splitlines()] if status is not None else []
    lines = [line for line in lines if line.strip() not in {text.strip() for text in error}]
    parts: list[RenderableType] = [Text(head, style=f"bold {_style(status)}"), _progress(status, width=width)]
    if lines:
        parts.append(Panel(Text("\n".join(line.strip() for line in lines)), title="who does what", title_align="left"))
    parts.append(_curves(viewed, width=width))
    parts.append(_queues(viewed))
    if error:
        room = _ERROR_LINES if height is None else max(1, min(_ERROR_LINES, height - len(lines) - len(_SHOWN) - 9))
        # The first line says what happened, the last ones how.
        shown = error if len(error) <= room else [error[0], *error[len(error) - room + 1 :]]
        parts.append(
            Panel(
                Text("\n".join(shown), overflow="ellipsis", no_wrap=True), title="last error", title_align="left", style="red"
            )
        )
    if height is not None:
        parts.append(Text("q or Ctrl-C ends", style="dim"))
    return Group(*parts)


def sparkline(values: np.ndarray, *, width: int) -> str:
    """Return the values as `width` bars at most, each the mean of its neighbours, scaled from the least to the greatest."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return ""
    means = np.array([part.mean() for part in np.array_split(finite, min(width, len(finite)))])
    low, high = float(means.min()), float(means.max())
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((float(mean) - low) * scale)] for mean in means)


@contextmanager
def reading_keys() -> Iterator[Callable[[float], bool]]:
    """Read keys as they come, without showing them; yields a function that waits for a key and returns whether to end.

    The function takes the seconds to wait. Ctrl-C is a key like any other here, so that the terminal is always restored.
    """
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def has_ended(timeout_s: float) -> bool:
        if not select.select([descriptor], [], [], timeout_s)[0]:
            return False
        keys = os.read(descriptor, 1024)
        return not keys or bool(set(keys) & set(b"qQ\x03\x04"))

    tty.setraw(descriptor, termios.TCSADRAIN)
    settings = termios.tcgetattr(descriptor)
    settings[1] = before[1]  # a line break in the output still goes to the start of the line
    termios.tcsetattr(descriptor, termios.TCSADRAIN, settings)
    try:
        yield has_ended
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _style(status: RunStatus | None) -> str:
    return "red" if status is None else _STYLES.get(status.state, "cyan")


def _progress(status: RunStatus | None, *, width: int) -> RenderableType:
    if status is None or not status.max_steps:
        return Text("")
    step = max((report.step for role in status.roles for report in role.reports), default=0)
    room = max(10, width - 24)
    filled = round(room * min(1.0, step / status.max_steps))
    return Text.assemble(("━" * filled, "green"), ("━" * (room - filled), "dim"), f" {step}/{status.max_steps} steps")


def _curves(viewed: ViewedRun, *, width: int) -> RenderableType:
    table = Table(box=None, padding=(0, 1), show_header=True, header_style="dim")
    for title, justify in (("", "left"), ("now", "right"), ("least", "right"), ("greatest", "right"), ("all steps", "left")):
        table.add_column(title, justify=justify, no_wrap=True)  # pyright: ignore[reportArgumentType]  # Rich's literals
    for label, key in _SHOWN.items():
        values = viewed.metrics.values(key)
        if len(values):
            bars = sparkline(values, width=max(8, width - 60))
            table.add_row(
                label, *(f"{value:.4g}" for value in (values[-1], values.min(), values.max())), Text(bars, style="cyan")
            )
    if not table.row_count:
        return Text("no step has ended yet: curves appear with the first", style="dim")
    return table


def _queues(viewed: ViewedRun) -> RenderableType:
    found: Sequence[tuple[str, np.ndarray]] = [(label, viewed.metrics.values(key)) for label, key in _QUEUES.items()]
    numbers = [f"{label} {values[-1]:.4g}" for label, values in found if len(values)]
    return Text(f"at the last step: {' · '.join(numbers)}" if numbers else "", style="dim")
