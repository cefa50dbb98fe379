"""Measures how much memory workers have, from outside: one that takes too much is named and ended before the machine runs out.

Called by `workers.pool`. Linux only; elsewhere everything is 0.
"""

import asyncio
import re
from collections.abc import Collection
from pathlib import Path

from trivet.process.process_table import read_processes

MEASURE_INTERVAL_S = 0.5
"""Seconds between two looks at workers. One can take a few GiB in that time."""
_TURNS_PER_SESSION = 20
"""Every so often, each 10 s, what the workers started is counted too: that reads a file per process of the machine."""
_PROPORTIONAL = re.compile(r"^Pss:\s+(\d+) kB$", re.MULTILINE)
_RESIDENT = re.compile(r"^VmRSS:\s+(\d+) kB$", re.MULTILINE)
_TOTAL = re.compile(r"^MemTotal:\s+(\d+) kB$", re.MULTILINE)
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files of a container's limit, of version 2 and version 1; absent or `max` where there is none."""


async def measure_sessions(leaders: Collection[int], *, turn: int) -> dict[int, int]:
    """Return the memory of each worker, by pid, in bytes.

    Args:
        turn: the number of this look; on most of them only the workers themselves are measured, not what they started.
    """
    taken = {pid: resident_bytes(pid) for pid in leaders}
    if turn % _TURNS_PER_SESSION == 0:
        taken |= await asyncio.to_thread(session_bytes, list(taken))
    return taken


def describe_excess(taken_bytes: int, limit_bytes: int) -> str:
    """Return why a worker was ended, as the end of a sentence."""
    taken, limit = (f"{number / 2**30:.2f} GiB" for number in (taken_bytes, limit_bytes))
    return f"was ended because it had {taken} of memory, and max_worker_memory is {limit}"


def resident_bytes(pid: int) -> int:
    """Return the resident memory of one process; 0 when it is gone. It costs 20 microseconds."""
    return _read_kib(Path(f"/proc/{pid}/status"), _RESIDENT) * 1024


def session_bytes(leaders: Collection[int]) -> dict[int, int]:
    """Return the memory of each session: of its leader and all that it started, what they share counted once.

    It reads a file per process of the machine and walks the page tables of the sessions' own, so it belongs into a thread.
    """
    totals = dict.fromkeys(leaders, 0)
    for pid, entry in read_processes().items():
        if entry.session in totals:
            totals[entry.session] += _read_kib(Path(f"/proc/{pid}/smaps_rollup"), _PROPORTIONAL) * 1024
    return totals


def memory_limit(max_gib: float | None) -> int:
    """Return the limit of one worker's memory in bytes: `max_gib`, or half of what the machine has where that is None."""
    return machine_bytes() // 2 if max_gib is None else int(max_gib * 2**30)


def machine_bytes() -> int:
    """Return the memory of this machine, or the limit of the container that this process is in."""
    total = _read_kib(Path("/proc/meminfo"), _TOTAL) * 1024
    for name in _CGROUP_LIMITS:
        try:
            text = Path(name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            return min(total, int(text))
    return total


def _read_kib(path: Path, pattern: re.Pattern[str]) -> int:
    try:
        match = pattern.search(path.read_text())
    except OSError:  # it ended while we looked
        return 0
    return int(match.group(1)) if match else 0
