"""Ties a process to its parent, so that no violent end leaves one behind (invariant 7), and tells which processes exist.

Done to every process that another of ours starts: roles, trainer ranks, engine workers, environment workers. A command that a user
starts is tied to nothing: with nohup it outlives its shell.
As a program, `python -m trivet.process.lifetime --parent PID COMMAND…` ties itself and becomes COMMAND: what takes seconds to
import is then tied from its first moment. Linux only; elsewhere nothing is tied.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import parent_process
from pathlib import Path

from trivet.process.signals import ignore_stacks_signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def module_command(module: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """Return the command that runs `module` as a program, with the packages of `python` alone.

    -P keeps the working directory out of the search: a file `msgspec.py` there would be imported in the place of the package.
    A user's own modules are installed, or in a directory that PYTHONPATH names.
    """
    return [python, "-P", "-m", module, *arguments]


def tied_command(command: Sequence[str], *, python: str = sys.executable) -> list[str]:
    """Return the command that runs `command` as a process which ends with this one."""
    return [*module_command("trivet.process.lifetime", "--parent", str(os.getpid()), python=python), *command]


def die_with_parent(signal_number: int = signal.SIGKILL, *, parent: int | None = None) -> None:
    """Ask the kernel to send this process `signal_number` when its parent ends; end at once when that has happened already.

    Args:
        parent: pid of the process that started this one. Processes of multiprocessing know it themselves; any other that
            does not say it cannot notice a parent that ended before this call.
    """
    expected = os.getppid() if parent is None else parent
    _prctl(_PR_SET_PDEATHSIG, signal_number)
    # A process of multiprocessing's fork server is not a child of its starter, so comparing the parent's pid is not enough.
    starter = parent_process()
    has_starter_ended = starter is not None and starter.pid is not None and not process_exists(starter.pid)
    if os.getppid() != expected or has_starter_ended:
        os.kill(os.getpid(), signal_number)


def tie_forks() -> None:
    """Tie what this process forks from now on to it, as far as the fork comes from the main thread.

    The kernel watches the thread that forked, not the process: tied to one that ends early, a child would be killed with it.
    Programs that are started by fork and exec are not reached; they must look after themselves.
    """
    is_from_main_thread = False

    def remember() -> None:
        nonlocal is_from_main_thread
        is_from_main_thread = threading.current_thread() is threading.main_thread()

    def tie() -> None:
        if is_from_main_thread:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    os.register_at_fork(before=remember, after_in_child=tie)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that this process can find and end them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (OSError, AttributeError):
        return
    if prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """One process as /proc shows it."""

    state: str
    """`T` after SIGSTOP or its like, `Z` for a process that ended and was not waited for."""
    parent: int
    session: int
    """Process id of the session's leader, which may have ended."""


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


def end_session(leader: int) -> int:
    """Kill every process of the session that `leader` leads or led: what it forked and left is found too.

    Returns:
        How many there were.
    """
    pids = [pid for pid, entry in read_processes().items() if entry.session == leader]
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(pids)


def process_exists(pid: int) -> bool:
    """Return whether a process of this machine has this id, one that ended but was not waited for included."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # no process id is that large
        return False
    except PermissionError:
        return True
    return True


def main(argv: Sequence[str]) -> None:
    """Tie this process to its parent and become the command: `--parent PID COMMAND…`."""
    _, parent, *command = argv
    die_with_parent(parent=int(parent))
    ignore_stacks_signal()
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
