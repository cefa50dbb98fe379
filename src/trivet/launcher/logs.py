"""Reads the logs of the roles while they are written, and writes the launcher's own."""

import errno
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from trivet.launcher.terminal import Terminal
from trivet.telemetry.logs import LAUNCHER, json_line

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
            start = max(offset, file.seek(0, 2) - _TAIL_BYTES)
            file.seek(start)
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
        self._terminal: Terminal | None = Terminal(terminal)
        self._file = file
        self._now = now
        self._as_json = as_json

    def say(self, text: str) -> None:
        """Write a message of the launcher, each of its lines with the time."""
        for line in text.splitlines():
            self.show(self._format(line))

    def show(self, line: str) -> None:
        """Pass on a line of a role as it is."""
        with suppress(OSError):  # a full disk: what is not written yet is tried again with the next line, and the run goes on
            print(line, file=self._file, flush=True)
        self._use_terminal(lambda terminal: terminal.print(line))

    def show_progress(self, *, step: int, max_steps: int | None, doing: str) -> None:
        """Update the bar of a terminal; lines in a file stay lines."""
        self._use_terminal(lambda terminal: terminal.show_progress(step=step, max_steps=max_steps, doing=doing))

    def close(self) -> None:
        """Leave the terminal as it was. More can be said afterwards."""
        self._use_terminal(Terminal.close)

    def _format(self, line: str) -> str:
        if self._as_json:
            return json_line(level="INFO", time=time.time(), role=LAUNCHER, logger=__name__, message=line)
        return f"{self._now()} {LAUNCHER} {line}"

    def _use_terminal(self, use: Callable[[Terminal], None]) -> None:
        if self._terminal is None:
            return
        try:
            use(self._terminal)
        except OSError as exc:  # the terminal was closed, or the reader of our pipe has gone: the run goes on
            if exc.errno != errno.ENOSPC:
                self._terminal = None
