"""Starts and ends the processes of a run. Each child leads a session of its own and dies with the launcher."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from trivet.launcher.plan import ProcessSpec
from trivet.lifetime import tied_command
from trivet.process_table import descendants
from trivet.stacks import STACKS_SIGNAL

_POLL_S = 0.05
_KILL_TIMEOUT_S = 5.0
"""A killed process is gone within milliseconds, unless the kernel itself is stuck in it."""


class Child:
    """One started role.

    >>> child = start(spec, python=sys.executable, environ=os.environ)
    >>> child.exit_code is None
    True
    >>> stop([child], timeout_s=20.0)
    """

    def __init__(self, spec: ProcessSpec, process: "subprocess.Popen[bytes]", *, log_offset: int) -> None:
        self.spec = spec
        self.log_offset = log_offset
        """Where this attempt's output starts in the log."""
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; -N when signal N ended it."""
        return self._process.poll()

    def signal_group(self, number: signal.Signals) -> None:
        if self.exit_code is not None:
            return
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return

    def signal_leader(self, number: signal.Signals) -> None:
        """Only the role itself, not what it started."""
        if self.exit_code is None:
            self._process.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended after at most `timeout_s`."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True


def start(spec: ProcessSpec, *, python: str, environ: Mapping[str, str]) -> Child:
    """
    Raises:
        OSError: the log cannot be written or the interpreter cannot be run.
    """
    spec.log.parent.mkdir(parents=True, exist_ok=True)
    with spec.log.open("ab") as log:
        offset = log.tell()
        process = subprocess.Popen(
            tied_command(spec.argv, python=python),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**spec.env_defaults, **environ, **spec.env},
            start_new_session=True,
        )
    return Child(spec, process, log_offset=offset)


def stop(
    children: Sequence[Child],
    *,
    timeout_s: float,
    is_hurried: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Child]:
    """End all children: SIGTERM to every group at once, one deadline, then SIGKILL.

    Args:
        is_hurried: asked while waiting; True ends the wait.

    Returns:
        Those that had to be killed.
    """
    for child in children:
        child.signal_group(signal.SIGTERM)
    deadline = clock() + timeout_s
    while any(child.exit_code is None for child in children) and clock() < deadline and not is_hurried():
        sleep(_POLL_S)
    killed = [child for child in children if child.exit_code is None]
    for child in killed:
        child.signal_group(signal.SIGKILL)
    for child in killed:
        child.wait(_KILL_TIMEOUT_S)
    return killed


def end_orphans(
    *,
    spared: Collection[int] = (),
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Kill whatever still descends from this process: what left its group, or outlived the role that started it.

    For a process that has called `lifetime.adopt_orphans`, when the roles that ended have been waited for.

    Args:
        spared: roles that go on, with all that descends from them.
    """
    deadline = clock() + _KILL_TIMEOUT_S
    while (pids := descendants(os.getpid(), spared=spared)) and clock() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
            except (ProcessLookupError, ChildProcessError):  # it is gone, or its own parent has not ended yet
                continue
        sleep(_POLL_S)


def show_stacks(pids: Iterable[int]) -> None:
    """Have processes that listen to STACKS_SIGNAL write theirs.

    Args:
        pids: as they were reported; one that does not descend from this process is another's by now.
    """
    for pid in set(pids).intersection(descendants(os.getpid())):
        try:
            os.kill(pid, STACKS_SIGNAL)
        except ProcessLookupError:
            continue
