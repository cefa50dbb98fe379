"""Limits what workers take: memory, which is measured from outside, the size of their log, and a directory for temporary files.

A worker that takes too much memory is named and ended by `workers.pool` before the machine runs out. Memory is measured on Linux
only; elsewhere everything is 0.
"""

import asyncio
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path

from trivet.environments.workers.containers import remove_containers
from trivet.process.lifetime import read_processes
from trivet.process.lock import lock_directory, remove_if_free

logger = logging.getLogger(__name__)

_LOOKS_PER_SESSION = 20
"""Every so often, each 10 s, what the workers started is counted too: that reads a file per process of the machine."""
_PROPORTIONAL = re.compile(r"^Pss:\s+(\d+) kB$", re.MULTILINE)
_RESIDENT = re.compile(r"^VmRSS:\s+(\d+) kB$", re.MULTILINE)
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files of a container's limit, of version 2 and version 1; absent or `max` where there is none."""

MAX_LOG_BYTES = 64 << 20
"""A run of weeks whose environment logs a line per group writes less."""
_KEPT_BYTES = MAX_LOG_BYTES // 2
"""Bytes of the start that stay when the log is cut."""
_TAIL_BYTES = 8_192
_TAIL_LINES = 20
_PREFIX = "trivet-worker-"
"""Begins the names of workers' directories."""


async def measure_sessions(leaders: Collection[int], *, look: int) -> dict[int, int]:
    """Return the memory of each worker, by pid, in bytes. On most looks, numbered by `look`, what they started is left out."""

    def measure_all() -> dict[int, int]:
        totals = dict.fromkeys(leaders, 0)
        for pid, entry in read_processes().items():
            if entry.session in totals:  # memory that processes share is counted once
                totals[entry.session] += _read_bytes(Path(f"/proc/{pid}/smaps_rollup"), _PROPORTIONAL)
        return totals

    if look % _LOOKS_PER_SESSION == 0:
        return await asyncio.to_thread(measure_all)
    return {pid: _read_bytes(Path(f"/proc/{pid}/status"), _RESIDENT) for pid in leaders}  # 20 microseconds a worker


def memory_limit(max_gib: float | None) -> int:
    """Return the limit of one worker's memory in bytes: `max_gib`, or half of what the machine or its container has."""
    if max_gib is not None:
        return int(max_gib * 2**30)
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for name in _CGROUP_LIMITS:
        try:
            text = Path(name).read_text().strip()
        except OSError:
            continue
        limits += [int(text)] if text.isdigit() else []
    return min(limits) // 2


def _read_bytes(path: Path, pattern: re.Pattern[str]) -> int:
    try:
        match = pattern.search(path.read_text())
    except OSError:  # it ended while we looked
        return 0
    return int(match.group(1)) * 1024 if match else 0


class WorkerLog:
    """The log file of one environment, which all its workers append to themselves, so nothing of theirs waits.

    It keeps its start and its newest part: a worker that prints without end must not fill the disk.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_cut = False

    def limit_size(self) -> None:
        """Cut the log where it has become too large, and say so the first time."""
        if not self.path.exists() or self.path.stat().st_size <= MAX_LOG_BYTES:
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
        """Return the end of the log from byte `since` on, for an error message; empty when nothing was written."""
        with self.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0 if self._is_cut else since, size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        shown = lines[-_TAIL_LINES:]
        return "\n  ".join([f" Last lines of {self.path}:", *shown]) if shown else ""


class WorkerDirectory:
    """A new directory of this user alone. It is locked as long as this process lives, so that no other pool removes it."""

    def __init__(self) -> None:
        """Make the directory; raises OSError when there is no place for temporary files."""
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock = lock_directory(self.path)

    def remove(self) -> None:
        """Remove the worker's containers and the directory, once nothing of the worker runs any more. May be called again."""
        if self._lock >= 0:
            remove_containers(self.path)
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def sweep_directories() -> int:
    """Remove the directories of workers whose pool was killed, and their containers; return how many containers there were."""
    removed: list[int] = []
    for directory in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        remove_if_free(directory, before=lambda path: removed.append(remove_containers(path)))
    return sum(removed)
