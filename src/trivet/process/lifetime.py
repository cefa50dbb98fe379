"""Ties a process to its parent, so that it ends even when the parent is killed (invariant 7), and lists the processes that exist.

Every process that trivet starts is tied: roles, trainer ranks, engine workers, environment workers. A command that a user starts is
not: with nohup it outlives its shell.

The program `python -m trivet.process.lifetime --parent PID COMMAND…` ties itself and then becomes COMMAND. So COMMAND is tied from
its start, and not only after imports that take seconds. Linux only; on other systems nothing is tied.
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
    """Return the command that runs `module` as a program, without modules of the working directory.

    -P keeps the working directory out of `sys.path`: a file `msgspec.py` there would be imported instead of the package. A user's
    own modules must be installed, or in a directory that PYTHONPATH names.
    """
    return [python, "-P", "-m", module, *arguments]


def tied_command(command: Sequence[str], *, python: str = sys.executable) -> list[str]:
    """Return a command that runs `command` as a process which ends when this process ends."""
    return [*module_command("trivet.process.lifetime", "--parent", str(os.getpid()), python=python), *command]


def die_with_parent(signal_number: int = signal.SIGKILL, *, parent: int | None = None) -> None:
    """Make the kernel send `signal_number` to this process when its parent ends. If the parent has ended already, send it now.

    Args:
        parent: pid of the process that started this one. Without it a parent that ended before this call is not noticed, except in
            processes of multiprocessing, which know their parent.
    """
    expected = os.getppid() if parent is None else parent
    _prctl(_PR_SET_PDEATHSIG, signal_number)
    # A process of multiprocessing's fork server is not a child of its starter, so comparing the parent's pid is not enough.
    starter = parent_process()
    has_starter_ended = starter is not None and starter.pid is not None and not process_exists(starter.pid)
    if os.getppid() != expected or has_starter_ended:
        os.kill(os.getpid(), signal_number)


def tie_forks() -> None:
    """Tie all processes to this one that its main thread forks from now on.

    The kernel watches the thread that forked, not the process. So a child that another thread forks is not tied: it would be killed
    when that thread ends. Programs that are started by fork and exec are not tied here either.
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
    """State letter of the kernel: `T` after SIGSTOP or a similar signal, `Z` for a process that ended and was not waited for."""
    parent: int
    session: int
    """Process id of the session's leader, which may have ended."""


ProcessTable = Mapping[int, ProcessEntry]
"""Processes of this machine by pid."""


def read_processes() -> ProcessTable:
    """Read the process table from /proc. It reads one file for each process of the machine."""
    table: dict[int, ProcessEntry] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text(errors="replace")
        except OSError:  # the process ended meanwhile
            continue
        state, parent, _, session = stat.rpartition(")")[2].split()[:4]
        table[int(entry.name)] = ProcessEntry(state, int(parent), int(session))
    return table


def descendants(pid: int, *, spared: Collection[int] = (), table: ProcessTable | None = None) -> list[int]:
    """Return the children of `pid`, their children and so on, without those in `spared` and their descendants.

    Args:
        table: a process table that was read before; None reads it now.
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
    """Kill every process of the session that `leader` leads or led, also those whose parent has ended.

    Returns:
        The number of these processes.
    """
    pids = [pid for pid, entry in read_processes().items() if entry.session == leader]
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(pids)


def process_exists(pid: int) -> bool:
    """Return whether a process of this machine has this id. A process that ended and was not waited for counts."""
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
