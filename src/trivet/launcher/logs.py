"""Reads the roles' logs while they grow. Writes the launcher's own log to a file and to the terminal.

A progress bar at the bottom of the terminal shows the step and the run's activity. A pipe gets plain lines and no bar.
"""

import errno
import re
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from trivet.telemetry.logs import LAUNCHER, json_line
from trivet.wire.status import RunStatus

if TYPE_CHECKING:
    from rich.progress import Progress

_TAIL_BYTES = 64 << 10
"""Bytes at the end of a log that are searched for the lines to quote, whatever its size."""
_CHUNK_BYTES = 1 << 20
"""Most bytes read per call. The rest waits for the next call, so that one role with much output does not delay the others."""
_TERMINAL_LINE = re.compile(r".{0,40}\b(SUCCESS|WARNING|ERROR)\b")
"""Step lines (level SUCCESS), warnings and errors; the level stands within the first 40 characters. Other lines stay in the log."""


def is_for_terminal(line: str) -> bool:
    """Return whether the launcher repeats this line of a role on the terminal."""
    return _TERMINAL_LINE.match(line) is not None


class LogFollower:
    """Reads the whole lines that were added to a log since the last call."""

    def __init__(self, path: Path, *, offset: int) -> None:
        self._path = path
        self._offset = offset
        self._partial = b""

    def read_lines(self) -> list[str]:
        """Return the new whole lines, at most a chunk of them; none while the log is missing."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                added = file.read(_CHUNK_BYTES)
        except FileNotFoundError:
            return []
        self._offset += len(added)
        *lines, self._partial = (self._partial + added).split(b"\n")
        return [line.decode(errors="replace").rstrip("\r") for line in lines]


def last_lines(path: Path, *, offset: int, count: int = 20) -> list[str]:
    """Return the last `count` lines of what a log holds from `offset` on."""
    try:
        with path.open("rb") as file:
            file.seek(max(offset, file.seek(0, 2) - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-count:]
    except FileNotFoundError:
        return []


def quote_log(path: Path, *, offset: int) -> str:
    """Return the last lines of a log from `offset` on, and where the whole log is."""
    lines = last_lines(path, offset=offset)
    quoted = "\n".join(f"  | {line}" for line in lines) if lines else "  (it wrote nothing)"
    return f"last lines of {path}:\n{quoted}\nfull log: {path}"


class RunLog:
    """Writes the launcher's messages and some lines of roles: to logs/rl.log, and to the terminal while it is open."""

    def __init__(
        self,
        terminal: TextIO,
        file: TextIO,
        *,
        now: Callable[[], str] = lambda: time.strftime("%H:%M:%S"),
        as_json: bool = False,
    ) -> None:
        """Write to two outputs that the caller has opened.

        Args:
            now: the time of day that starts a line.
            as_json: write each line as one JSON object, as the roles do with `log.json_logging`.
        """
        self._terminal: TextIO | None = terminal
        self._progress = make_progress(terminal, redirects_prints=False) if terminal.isatty() else None
        self._file = file
        self._now = now
        self._as_json = as_json

    def say(self, text: str) -> None:
        """Write a message of the launcher, each of its lines with the time."""
        for line in text.splitlines():
            if self._as_json:
                self.write_line(json_line(level="INFO", time=time.time(), role=LAUNCHER, logger=__name__, message=line))
            else:
                self.write_line(f"{self._now()} {LAUNCHER} {line}")

    def write_line(self, line: str) -> None:
        """Write one finished line as it is, to the file, and to the terminal above the bar."""
        with suppress(OSError):  # on a full disk the run goes on: Python keeps the text and writes it with the next line
            print(line, file=self._file, flush=True)
        with self._terminal_that_may_close() as terminal:
            if terminal is not None and self._progress is not None and self._progress.live.is_started:
                self._progress.console.out(line, highlight=False)
            elif terminal is not None:
                print(line, file=terminal, flush=True)

    def show_progress(self, *, step: int, max_steps: int | None, activity: str) -> None:
        """Update the bar of a terminal.

        Args:
            step: the last finished one; it may be smaller than before, after a restart.
            max_steps: None for a run without end.
        """
        progress = self._progress
        with self._terminal_that_may_close() as terminal:
            if progress is None or terminal is None:
                return
            if not progress.tasks:
                progress.add_task("", total=max_steps, activity=activity)
                progress.start()
            progress.update(progress.task_ids[0], completed=step, total=max_steps, activity=activity)
            progress.refresh()

    def close(self) -> None:
        """Remove the bar. Lines can be written afterwards. May be called again."""
        with self._terminal_that_may_close() as terminal:
            if self._progress is not None and terminal is not None:
                self._progress.stop()
        self._progress = None

    @contextmanager
    def _terminal_that_may_close(self) -> Generator[TextIO | None]:
        """Yield the terminal, or None once it was closed. A failed write does not end the run.

        A closed terminal, or a pipe whose reader has gone, stays closed. An output redirected to a full disk may work again.
        """
        try:
            yield self._terminal
        except OSError as exc:
            if exc.errno != errno.ENOSPC:
                self._terminal = None


def describe_activity(status: RunStatus) -> str:
    """Return the run's activity: the trainer's, with the orchestrator's behind it if the trainer waits for the orchestrator.

    Until the trainer has reported, it is the orchestrator's alone. Examples: `waits for batch 12 (filling batch 12)`,
    `training step 12`, `starting`.
    """
    first_reports = {role.name: role.reports[0] for role in status.roles if role.reports}
    trainer, orchestrator = first_reports.get("trainer"), first_reports.get("orchestrator")
    if trainer is None:
        return orchestrator.activity if orchestrator is not None else "starting"
    if not trainer.waits_for:
        return trainer.activity
    does_wait_for_it = orchestrator is not None and trainer.waits_for == "orchestrator"
    return f"waits for {trainer.activity}" + (f" ({orchestrator.activity})" if orchestrator and does_wait_for_it else "")


def finished_step(status: RunStatus) -> int:
    """Return the last step that a trainer rank of this attempt has finished."""
    return max((report.step for role in status.roles if role.name == "trainer" for report in role.reports), default=0)


def make_progress(file: TextIO, *, redirects_prints: bool) -> "Progress":
    """Make the bar of a run: the step, the time so far, the time left, and the run's activity (the field `activity`).

    Args:
        redirects_prints: redirect standard output and error, so that the bar stays below all prints of this process, and
            refresh the bar from a thread. False: leave them alone, and let the caller refresh the bar.
    """
    from rich.console import Console  # here: most outputs are no terminal, and `--help` and `--dry-run` have no bar
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    return Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=30),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[activity]}", markup=False),
        console=Console(file=file),
        auto_refresh=redirects_prints,
        redirect_stdout=redirects_prints,
        redirect_stderr=redirects_prints,
        transient=True,
    )
