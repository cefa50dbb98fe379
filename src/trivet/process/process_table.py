"""Reads which processes exist on this machine, whose children they are, and in which state. Linux only: it reads /proc.

Used by whoever ends, watches or reports processes. Signals nothing.
"""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """One process as /proc shows it."""

    state: str
    parent: int
    session: int
    """Process id of the session's leader, which may have ended."""

    @property
    def is_stopped(self) -> bool:
        """True after SIGSTOP or its like; a process that a debugger holds does not count."""
        return self.state == "T"


ProcessTable = Mapping[int, ProcessEntry]
"""Processes of this machine by pid."""


def read_processes() -> ProcessTable:
    """Read what /proc shows now. It costs a file per process of the machine."""
    table: dict[int, ProcessEntry] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text(errors="replace")
        except OSError:  # it ended while we looked
            continue
        state, parent, _, session = stat.rpartition(")")[2].split()[:4]
        table[int(entry.name)] = ProcessEntry(state, int(parent), int(session))
    return table


def descendants(pid: int, *, spared: Collection[int] = (), table: ProcessTable | None = None) -> list[int]:
    """Return the children of `pid`, their children and so on; without those in `spared` and their children.

    Args:
        table: what /proc showed at one moment; None reads it now.
    """
    children_of: dict[int, list[int]] = {}
    for child, entry in (table or read_processes()).items():
        children_of.setdefault(entry.parent, []).append(child)
    found: list[int] = []
    waiting = [pid]
    while waiting:
        children = [child for child in children_of.get(waiting.pop(), []) if child not in spared]
        found += children
        waiting += children
    return found


def process_exists(pid: int) -> bool:
    """Return whether a process of this machine has this id, one that ended but was not waited for included."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # no process id is that large
        return False
    except PermissionError:
        return True
    return True
