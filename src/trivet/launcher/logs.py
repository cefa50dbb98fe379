"""Reads the logs of the roles while they are written, and writes the launcher's own: to a file, and to the terminal with a bar.

The bar says how far the run is and what it waits for. Only a terminal has one; a file or a pipe gets plain lines.
"""

import errno
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from trivet.telemetry.logs import LAUNCHER, json_line
from trivet.wire.status import RunStatus

if TYPE_CHECKING:
    from rich.progress import Progress

_TAIL_BYTES = 64 << 10
"""Enough for the lines that are quoted of a log, whatever its size."""
_CHUNK_BYTES = 1 << 20
"""Read at once of a log that grows: more is read in the next round, so that one role cannot hold up the others."""
_FOR_THE_TERMINAL = re.compile(r".{0,40}\b(SUCCESS|WARNING|ERROR)\b")
"""Step lines, and what went wrong. Everything else of a role stays in its log."""


def is_for_terminal(line: str) -> bool:
    """Return whether the launcher repeats this line of a role on the terminal."""
    return _FOR_THE_TERMINAL.match(line) is not None


class LogFollower:
    """Reads the whole lines that were added to a log since the last look."""

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
    """Writes what the launcher says: to the terminal as long as there is one, and always to logs/rl.log."""

    def __init__(
        self,
        terminal: TextIO,
        file: TextIO,
        *,
        now: Callable[[], str] = lambda: time.strftime("%H:%M:%S"),
        as_json: bool = False,
    ) -> None:
        """Open nothing; both outputs are given.

        Args:
            now: the time of day that starts a line.
            as_json: write each line as one JSON object, as the roles do with `log.json_logging`.
        """
        self._terminal: TextIO | None = terminal
        self._progress = make_progress(terminal, follows_prints=False) if terminal.isatty() else None
        self._file = file
        self._now = now
        self._as_json = as_json

    def say(self, text: str) -> None:
        """Write a message of the launcher, each of its lines with the time."""
        for line in text.splitlines():
            if self._as_json:
                self.show(json_line(level="INFO", time=time.time(), role=LAUNCHER, logger=__name__, message=line))
            else:
                self.show(f"{self._now()} {LAUNCHER} {line}")

    def show(self, line: str) -> None:
        """Pass on a line of a role as it is, above the bar."""
        with suppress(OSError):  # a full disk: what is not written yet is tried again with the next line, and the run goes on
            print(line, file=self._file, flush=True)

        def print_line() -> None:
            if self._progress is not None and self._progress.live.is_started:
                self._progress.console.out(line, highlight=False)
            else:
                print(line, file=self._terminal, flush=True)

        self._use_terminal(print_line)

    def show_progress(self, *, step: int, max_steps: int | None, doing: str) -> None:
        """Update the bar of a terminal.

        Args:
            step: the last finished one; it may be smaller than before, after a restart.
            max_steps: None for a run without end.
        """
        progress = self._progress
        if progress is None:
            return

        def update() -> None:
            if not progress.tasks:
                progress.add_task("", total=max_steps, doing=doing)
                progress.start()
            progress.update(progress.task_ids[0], completed=step, total=max_steps, doing=doing)
            progress.refresh()

        self._use_terminal(update)

    def close(self) -> None:
        """Remove the bar. More can be said afterwards. May be called again."""
        if self._progress is not None:
            self._use_terminal(self._progress.stop)
            self._progress = None

    def _use_terminal(self, use: Callable[[], object]) -> None:
        if self._terminal is None:
            return
        try:
            use()
        except OSError as exc:  # the terminal was closed, or the reader of our pipe has gone: the run goes on
            if exc.errno != errno.ENOSPC:
                self._terminal = None


def describe_activity(status: RunStatus) -> str:
    """Say what the trainer does, else what the orchestrator does: the activity that the run waits for.

    Returns:
        `waits for batch 12 (filling batch 12)`, `training step 12`, or `starting`.
    """
    doing = {role.name: role.reports[0] for role in status.roles if role.reports}
    trainer, orchestrator = doing.get("trainer"), doing.get("orchestrator")
    if trainer is None:
        return orchestrator.activity if orchestrator is not None else "starting"
    if not trainer.waits_for:
        return trainer.activity
    behind = f" ({orchestrator.activity})" if orchestrator is not None and trainer.waits_for == "orchestrator" else ""
    return f"waits for {trainer.activity}{behind}"


def finished_step(status: RunStatus) -> int:
    """Return the last step that a trainer rank of this attempt has finished."""
    return max((report.step for role in status.roles if role.name == "trainer" for report in role.reports), default=0)


def make_progress(file: TextIO, *, follows_prints: bool) -> "Progress":
    """Make the bar of a run: the step, the time so far and left, and what the run does (the field `doing`).

    Args:
        follows_prints: stays below what anybody in this process prints, from a thread of its own. False leaves standard output
            alone, and the bar changes only when it is refreshed.
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
        TextColumn("{task.fields[doing]}", markup=False),
        console=Console(file=file),
        auto_refresh=follows_prints,
        redirect_stdout=follows_prints,
        redirect_stderr=follows_prints,
        transient=True,
    )
