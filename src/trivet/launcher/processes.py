"""Starts, signals and ends the processes of a run, and reads their reports. Each child leads its own session and dies with the
launcher.

The supervisor acts on processes only through a `ProcessHost`. `LocalHost` is the one for this machine. `cluster.host` has
another, for the processes of several nodes.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from trivet.config.layout import VENVS
from trivet.key_names import NAMES_VARIABLE
from trivet.launcher.plan import ProcessSpec, ReportFile
from trivet.process.lifetime import descendants, read_processes, tied_command
from trivet.process.signals import STACKS_SIGNAL
from trivet.telemetry.process_report import read_report
from trivet.wire.status import ProcessReport

_POLL_INTERVAL_S = 0.05
_KILL_TIMEOUT_S = 5.0
"""Longest wait for a killed process. It ends within milliseconds, unless it hangs in the kernel."""

ReportStamp = tuple[int, int] | None
"""Inode of a report's file and its modification time in nanoseconds; None while there is no file. Stamps are compared with each
other, never with a clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleReports:
    """The reports of a role's processes."""

    readable: tuple[ProcessReport, ...] = ()
    """The reports that could be read."""
    stamps: Mapping[str, ReportStamp] = field(default_factory=dict[str, ReportStamp])
    """A stamp that changes when a process reports again, by the name of the process."""


def read_reports(files: Sequence[ReportFile]) -> RoleReports:
    """Read the reports of a role's processes. A report that cannot be decoded still has a stamp: its process lives."""
    readable: list[ProcessReport] = []
    stamps: dict[str, ReportStamp] = {}
    for file in files:
        stamps[file.process] = None
        with suppress(FileNotFoundError):
            stat = file.path.stat()
            stamps[file.process] = stat.st_ino, stat.st_mtime_ns
        with suppress(msgspec.DecodeError):
            if (report := read_report(file.path)) is not None:
                readable.append(report)
    return RoleReports(readable=tuple(readable), stamps=stamps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """The functions by which the supervisor reads the time and sleeps. Tests pass a clock that they move themselves."""

    now: Callable[[], float] = time.monotonic
    """Monotonic seconds, for durations."""
    unix_time: Callable[[], float] = time.time
    """Seconds since 1970, for people."""
    sleep: Callable[[float], None] = time.sleep


SYSTEM_CLOCK = Clock()


class HostedProcess(Protocol):
    """One started process."""

    @property
    def spec(self) -> ProcessSpec:
        """The command, environment and log that it was started with."""
        ...

    @property
    def pid(self) -> int:
        """Process id on its node, which is also that of its group and session."""
        ...

    @property
    def log_offset(self) -> int:
        """Byte offset in the log at which the output of this process starts."""
        ...

    @property
    def exit_code(self) -> int | None:
        """Exit code: None while it runs; -N when signal N ended it; `exits.NODE_LOST` when it was lost with its node."""
        ...

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to its process group: the process and its children. Do nothing once it has ended."""
        ...

    def signal_leader(self, number: signal.Signals) -> None:
        """Send a signal to the process alone, not to its children."""
        ...

    def show_stacks(self, pids: Iterable[int]) -> None:
        """Make the process and its descendants, as far as they are among `pids`, write their stacks into their logs."""
        ...

    def read_reports(self) -> RoleReports:
        """Return the present reports of the role's processes."""
        ...


class ProcessHost(Protocol):
    """The machine or the nodes on which the processes of a run live. No method waits for a node to answer."""

    def start(self, spec: ProcessSpec) -> HostedProcess:
        """Start a process. Its output is appended to its log. The reports of an earlier process of the role are removed."""
        ...

    def stop(
        self, processes: Sequence[HostedProcess], *, timeout_s: float, is_hurried: Callable[[], bool]
    ) -> Sequence[HostedProcess]:
        """End all: SIGTERM to every process group at once, one deadline, then SIGKILL. Return the processes that were killed.

        Args:
            is_hurried: called while waiting. When it returns True, the wait ends and SIGKILL follows.
        """
        ...

    def end_orphans(self, *, spared: Collection[HostedProcess] = ()) -> None:
        """Kill processes that outlived the process that started them, except `spared` and their descendants.

        Call this after the processes that ended have been waited for.
        """
        ...

    def find_stopped(self, processes: Sequence[HostedProcess]) -> Sequence[tuple[int, ...]]:
        """Return for each process the pids of itself and its watched children that a signal has stopped."""
        ...

    def lost_nodes(self) -> frozenset[int]:
        """Return the nodes of the run that do not answer.

        Raises:
            RunDirectoryBusy: another node leads the run now.
        """
        ...

    def leaving_nodes(self) -> frozenset[int]:
        """Return the nodes, without this one, on which a signal has asked the launcher to end."""
        ...

    def joined_nodes(self) -> frozenset[int]:
        """Return the nodes that came for the first time since the last call."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A started process of this machine, as `HostedProcess`."""

    spec: ProcessSpec
    process: "subprocess.Popen[bytes]"
    log_offset: int

    @property
    def pid(self) -> int:
        """Process id, which is also that of its group and session."""
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code: None while it runs; -N when signal N ended it."""
        return self.process.poll()

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to its process group. Do nothing once it has ended."""
        if self.exit_code is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def signal_leader(self, number: signal.Signals) -> None:
        """Send a signal to the process alone, not to its children."""
        if self.exit_code is None:
            self.process.send_signal(number)

    def show_stacks(self, pids: Iterable[int]) -> None:
        """Make processes write their stacks into their logs.

        A pid that is no descendant may belong to a foreign process by now, so it gets no signal.
        """
        for pid in set(pids).intersection([self.pid, *descendants(self.pid)]):
            with suppress(ProcessLookupError):
                os.kill(pid, STACKS_SIGNAL)

    def read_reports(self) -> RoleReports:
        """Return the present reports of the role's processes."""
        return read_reports(self.spec.reports)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalHost:
    """The `ProcessHost` of this machine."""

    python: str
    """The interpreter that starts a process so that it ends with this one (`process.lifetime`)."""
    environ: Mapping[str, str]
    """Variables that every process inherits."""

    def start(self, spec: ProcessSpec) -> Child:
        """Start a process, as `ProcessHost.start`.

        Raises:
            OSError: the log cannot be written or the interpreter cannot be run.
        """
        for report in spec.reports:  # of the process that this one replaces
            report.path.unlink(missing_ok=True)
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
        return Child(spec=spec, process=process, log_offset=offset)

    @staticmethod
    def stop(
        processes: Sequence[HostedProcess],
        *,
        timeout_s: float,
        is_hurried: Callable[[], bool] = lambda: False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> Sequence[HostedProcess]:
        """End all processes, as `ProcessHost.stop`."""

        def await_end(running: Sequence[HostedProcess], timeout_s: float, is_over: Callable[[], bool]) -> list[HostedProcess]:
            deadline = clock.now() + timeout_s
            while any(process.exit_code is None for process in running) and clock.now() < deadline and not is_over():
                clock.sleep(_POLL_INTERVAL_S)
            return [process for process in running if process.exit_code is None]

        for process in processes:
            process.signal_group(signal.SIGTERM)
        killed = await_end(processes, timeout_s, is_hurried)
        for process in killed:
            process.signal_group(signal.SIGKILL)
        await_end(killed, _KILL_TIMEOUT_S, lambda: False)
        return killed

    @staticmethod
    def end_orphans(*, spared: Collection[HostedProcess] = ()) -> None:
        """Kill the descendants of this process, as `ProcessHost.end_orphans`.

        This process must have called `adopt_orphans`, so that orphans are its descendants too.
        """
        kept = {process.pid for process in spared}
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        while (pids := descendants(os.getpid(), spared=kept)) and time.monotonic() < deadline:
            for pid in pids:
                with suppress(ProcessLookupError, ChildProcessError):  # it has ended, or its own parent has not ended yet
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(_POLL_INTERVAL_S)

    @staticmethod
    def find_stopped(processes: Sequence[HostedProcess]) -> list[tuple[int, ...]]:
        """Return the stopped pids of each process, as `ProcessHost.find_stopped`. A process under a debugger does not count."""
        table = read_processes()
        families = [
            [process.pid, *(descendants(process.pid, table=table) if process.spec.are_children_watched else ())]
            for process in processes
        ]
        return [tuple(pid for pid in family if pid in table and table[pid].state == "T") for family in families]

    @staticmethod
    def lost_nodes() -> frozenset[int]:
        """Return no node: this is the only one."""
        return frozenset()

    @staticmethod
    def leaving_nodes() -> frozenset[int]:
        """Return no node."""
        return frozenset()

    @staticmethod
    def joined_nodes() -> frozenset[int]:
        """Return no node."""
        return frozenset()


def role_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that roles inherit, without those that set configuration keys: the roles' files have these already."""
    return {name: value for name, value in environ.items() if not name.startswith("TRIVET_") or name in (VENVS, NAMES_VARIABLE)}
