"""Starts, signals and ends the processes of a run. Each child leads a session of its own and dies with the launcher."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from trivet.launcher.plan import ProcessSpec
from trivet.process.lifetime import adopt_orphans, tied_command
from trivet.process.process_table import ProcessTable, descendants, read_processes
from trivet.process.stacks import STACKS_SIGNAL

_POLL_INTERVAL_S = 0.05
_KILL_TIMEOUT_S = 5.0
"""A killed process is gone within milliseconds, unless the kernel itself is stuck in it."""


class Child:
    """One started process.

    >>> child = host.start(spec)
    >>> child.exit_code is None
    True
    >>> host.stop([child], timeout_s=20.0)
    """

    def __init__(self, spec: ProcessSpec, process: "subprocess.Popen[bytes]", *, log_offset: int) -> None:
        self.spec = spec
        self.log_offset = log_offset
        """Byte of the log at which this attempt's output starts."""
        self._process = process

    @property
    def pid(self) -> int:
        """Process id, which is also that of its group and session."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code: None while it runs; -N when signal N ended it."""
        return self._process.poll()

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to it and to what it started; nothing once it has ended."""
        if self.exit_code is not None:
            return
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return

    def signal_leader(self, number: signal.Signals) -> None:
        """Send a signal to the role itself, not to what it started."""
        if self.exit_code is None:
            self._process.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for its end; returns whether it has ended."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessHost:
    """The machine on which the supervisor's processes run: all that it does to a process goes through here.

    >>> host = ProcessHost(python=sys.executable, environ=os.environ)
    >>> child = host.start(spec)
    """

    python: str
    """The interpreter that ties a process to this one."""
    environ: Mapping[str, str]
    """Variables that every process inherits."""

    def start(self, spec: ProcessSpec) -> Child:
        """Start a process; its output is appended to its log.

        Raises:
            OSError: the log cannot be written or the interpreter cannot be run.
        """
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        with spec.log.open("ab") as log:
            offset = log.tell()
            process = subprocess.Popen(
                tied_command(spec.argv, python=self.python),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**spec.env_defaults, **self.environ, **spec.env},
                start_new_session=True,
            )
        return Child(spec, process, log_offset=offset)

    @staticmethod
    def stop(children: Sequence[Child], *, timeout_s: float, is_hurried: Callable[[], bool] = lambda: False) -> Sequence[Child]:
        """End all children: SIGTERM to every group at once, one deadline, then SIGKILL.

        Args:
            is_hurried: asked while waiting; True ends the wait.

        Returns:
            Those that had to be killed.
        """
        for child in children:
            child.signal_group(signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        while any(child.exit_code is None for child in children) and time.monotonic() < deadline and not is_hurried():
            time.sleep(_POLL_INTERVAL_S)
        killed = [child for child in children if child.exit_code is None]
        for child in killed:
            child.signal_group(signal.SIGKILL)
        for child in killed:
            child.wait(_KILL_TIMEOUT_S)
        return killed

    @staticmethod
    def adopt_orphans() -> None:
        """Become the parent of every descendant whose own parent ends; `end_orphans` finds them then."""
        adopt_orphans()

    @staticmethod
    def end_orphans(*, spared: Collection[int] = ()) -> None:
        """Kill whatever still descends from this process: what left its group, or outlived the role that started it.

        To be called when the roles that ended have been waited for.

        Args:
            spared: pids of roles that go on, with all that descends from them.
        """
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        while (pids := descendants(os.getpid(), spared=spared)) and time.monotonic() < deadline:
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, os.WNOHANG)
                except (ProcessLookupError, ChildProcessError):  # it is gone, or its own parent has not ended yet
                    continue
            time.sleep(_POLL_INTERVAL_S)

    @staticmethod
    def show_stacks(pids: Iterable[int]) -> None:
        """Have processes that listen to STACKS_SIGNAL write their stacks into their logs.

        Args:
            pids: as they were reported; one that does not descend from this process is another's by now.
        """
        for pid in set(pids).intersection(descendants(os.getpid())):
            try:
                os.kill(pid, STACKS_SIGNAL)
            except ProcessLookupError:
                continue

    @staticmethod
    def read_processes() -> ProcessTable:
        """Read which processes this machine has."""
        return read_processes()
