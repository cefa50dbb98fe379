"""Measures the memory of workers, limits the size of their logs, and makes their directories for temporary files.

`workers.pool` ends a worker that takes too much memory, before the machine has none left. Memory is measured only on Linux;
elsewhere it is 0.
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

_CHECKS_PER_FULL_ONE = 20
"""Every 20th check, about every 10 s, also counts the processes that workers started. Most checks leave them out, because finding
them reads a file of every process on the machine."""
_PSS_LINE = re.compile(r"^Pss:\s+(\d+) kB$", re.MULTILINE)
"""The proportional set size: memory that processes share is divided among them."""
_RSS_LINE = re.compile(r"^VmRSS:\s+(\d+) kB$", re.MULTILINE)
"""The resident set size of one process."""
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files with a container's memory limit, of cgroup version 2 and version 1; absent or `max` where there is no limit."""

MAX_LOG_BYTES = 64 << 20
"""Size at which a log is cut. An environment that logs a line per group writes less in a run of weeks."""
_KEPT_BYTES = MAX_LOG_BYTES // 2
"""Bytes at the start of a log that stay when it is cut."""
_TAIL_BYTES = 8_192
"""Bytes at the end of a log that stay when it is cut, and that are searched for last lines."""
_TAIL_LINES = 20
_DIRECTORY_NAME_START = "trivet-worker-"
"""The first characters of the names of workers' directories."""


async def measure_sessions(leaders: Collection[int], *, check_number: int) -> dict[int, int]:
    """Return the memory of each worker, by pid, in bytes.

    Args:
        leaders: pids of the workers, which lead a session each.
        check_number: counts the calls. Every 20th call includes the other processes of a worker's session.
    """

    def measure_all() -> dict[int, int]:
        totals = dict.fromkeys(leaders, 0)
        for pid, entry in read_processes().items():
            if entry.session in totals:  # memory that processes share is counted once
                totals[entry.session] += _read_bytes(Path(f"/proc/{pid}/smaps_rollup"), _PSS_LINE)
        return totals

    if check_number % _CHECKS_PER_FULL_ONE == 0:
        return await asyncio.to_thread(measure_all)
    return {pid: _read_bytes(Path(f"/proc/{pid}/status"), _RSS_LINE) for pid in leaders}  # takes 20 microseconds for a worker


def memory_limit(max_gib: float | None) -> int:
    """Return the limit of one worker's memory in bytes: `max_gib`, or half of the memory of the machine or its container."""
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
    """Return the number of a line in a file below /proc, in bytes; 0 when the process has ended."""
    try:
        match = pattern.search(path.read_text())
    except OSError:
        return 0
    return int(match.group(1)) * 1024 if match else 0


class WorkerLog:
    """The log file of one environment. All its workers append to it directly, so no output waits for the pool.

    A log that becomes too large keeps its start and its newest part: a worker that prints without end must not fill the disk.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_cut = False

    def limit_size(self) -> None:
        """Cut the log if it has become too large, and warn the first time."""
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
    """A new directory that only this user can read. It is locked while this process runs, so that no other pool removes it."""

    def __init__(self) -> None:
        """Make the directory. Raises OSError when there is no writable directory for temporary files."""
        self.path = Path(tempfile.mkdtemp(prefix=_DIRECTORY_NAME_START))
        self._lock = lock_directory(self.path)

    def remove(self) -> None:
        """Remove the worker's containers and the directory. All processes of the worker must have ended. May be called again."""
        if self._lock >= 0:
            remove_containers(self.path)
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def sweep_directories() -> int:
    """Remove the directories of workers whose pool was killed, and their containers; return how many containers there were."""
    counts: list[int] = []
    for directory in Path(tempfile.gettempdir()).glob(f"{_DIRECTORY_NAME_START}*"):
        remove_if_free(directory, before=lambda path: counts.append(remove_containers(path)))
    return sum(counts)
