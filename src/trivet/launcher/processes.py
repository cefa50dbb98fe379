"""Starts, signals and ends the processes of a run. Each child leads a session of its own and dies with the launcher."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from trivet.launcher.host import HostedProcess
from trivet.launcher.plan import ProcessSpec
from trivet.launcher.reports import RoleReports, forget_reports, read_reports
from trivet.process.lifetime import adopt_orphans, descendants, read_processes, tied_command
from trivet.process.stacks import STACKS_SIGNAL

_POLL_INTERVAL_S = 0.05
_KILL_TIMEOUT_S = 5.0
"""A killed process is gone within milliseconds, unless the kernel itself is stuck in it."""


class Child:
    """One started process."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalHost:
    """This machine as the host of a run's processes: the `launcher.host.ProcessHost` of a run of one node."""

    python: str
    """The interpreter that ties a process to this one."""
    environ: Mapping[str, str]
    """Variables that every process inherits."""

    def start(self, spec: ProcessSpec) -> Child:
        """Start a process; its output is appended to its log. What an earlier one reported is removed.

        Raises:
            OSError: the log cannot be written or the interpreter cannot be run.
        """
        forget_reports(spec.reports)
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
    def stop(
        processes: Sequence[HostedProcess], *, timeout_s: float, is_hurried: Callable[[], bool] = lambda: False
    ) -> Sequence[HostedProcess]:
        """End all processes: SIGTERM to every group at once, one deadline, then SIGKILL.

        Args:
            is_hurried: asked while waiting; True ends the wait.

        Returns:
            Those that had to be killed.
        """
        for process in processes:
            process.signal_group(signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        while any(process.exit_code is None for process in processes) and time.monotonic() < deadline and not is_hurried():
            time.sleep(_POLL_INTERVAL_S)
        killed = [process for process in processes if process.exit_code is None]
        for process in killed:
            process.signal_group(signal.SIGKILL)
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        while any(process.exit_code is None for process in killed) and time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL_S)
        return killed

    @staticmethod
    def adopt_orphans() -> None:
        """Become the parent of every descendant whose own parent ends; `end_orphans` finds them then."""
        adopt_orphans()

    @staticmethod
    def end_orphans(*, spared: Collection[HostedProcess] = ()) -> None:
        """Kill whatever still descends from this process: what left its group, or outlived the role that started it.

        To be called when the roles that ended have been waited for.

        Args:
            spared: roles that go on, with all that descends from them.
        """
        kept = {process.pid for process in spared}
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        while (pids := descendants(os.getpid(), spared=kept)) and time.monotonic() < deadline:
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, os.WNOHANG)
                except (ProcessLookupError, ChildProcessError):  # it is gone, or its own parent has not ended yet
                    continue
            time.sleep(_POLL_INTERVAL_S)

    @staticmethod
    def show_stacks(process: HostedProcess, pids: Iterable[int]) -> None:
        """Have processes that listen to STACKS_SIGNAL write their stacks into their logs.

        Args:
            process: the one that started them, or is among them.
            pids: as they were reported; one that does not descend from `process` is another's by now.
        """
        for pid in set(pids).intersection([process.pid, *descendants(process.pid)]):
            try:
                os.kill(pid, STACKS_SIGNAL)
            except ProcessLookupError:
                continue

    @staticmethod
    def find_stopped(processes: Sequence[HostedProcess]) -> list[tuple[int, ...]]:
        """Return for each process the pids of those of its processes that a signal has stopped."""
        table = read_processes()
        families = [
            [process.pid, *(descendants(process.pid, table=table) if process.spec.are_children_watched else ())]
            for process in processes
        ]
        return [tuple(pid for pid in family if pid in table and table[pid].state == "T") for family in families]

    @staticmethod
    def lost_nodes() -> frozenset[int]:
        """Return the nodes that are not there: none, as this is the only one."""
        return frozenset()

    @staticmethod
    def leaving_nodes() -> frozenset[int]:
        """Return the other nodes that a signal has asked to end: there is none."""
        return frozenset()

    @property
    def has_nodes(self) -> bool:
        """True when there are more nodes than this one."""
        return False

    @staticmethod
    def read_reports(process: HostedProcess) -> RoleReports:
        """Return what its processes report now."""
        return read_reports(process.spec.reports)
