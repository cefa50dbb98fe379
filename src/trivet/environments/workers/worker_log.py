"""Keeps the log of an environment's workers within a size: a worker that prints without end must not fill the disk.

The log keeps its start and its newest part. Workers write to it themselves, at the end of the file, so nothing of theirs waits.
"""

import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

MAX_LOG_BYTES = 64 << 20
"""A run of weeks whose environment logs a line per group writes less."""
_KEPT_BYTES = MAX_LOG_BYTES // 2
"""Bytes of the start that stay when the log is cut."""
_TAIL_BYTES = 8_192
_TAIL_LINES = 20


class WorkerLog:
    """The log file of one environment, which all its workers append to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_cut = False

    def size(self) -> int:
        """Return the size in bytes; 0 before the first worker."""
        return self.path.stat().st_size if self.path.exists() else 0

    def limit_size(self) -> None:
        """Cut the log where it has become too large, and say so the first time."""
        if self.size() <= MAX_LOG_BYTES:
            return
        with self.path.open("rb+") as file:
            file.seek(-_TAIL_BYTES, os.SEEK_END)
            tail = file.read()
            file.truncate(_KEPT_BYTES)
        with self.path.open("ab") as file:
            file.write(b"\n... output left out: the log had %d MiB ...\n" % (MAX_LOG_BYTES >> 20) + tail)
        if not self._is_cut:
            logger.warning(
                "%s has more than %d MiB: its environment's workers print without end; from here on its middle is left out",
                self.path,
                MAX_LOG_BYTES >> 20,
            )
        self._is_cut = True

    def last_lines(self, *, since: int) -> str:
        """Return the end of the log, for an error message; empty when nothing was written.

        Args:
            since: where the output begins that may be quoted, in bytes.
        """
        with self.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0 if self._is_cut else since, size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        shown = lines[-_TAIL_LINES:]
        return "\n  ".join([f" Last lines of {self.path}:", *shown]) if shown else ""
