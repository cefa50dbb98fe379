"""Says what the supervisor asks of the place where a run's processes live: this machine (`launcher.processes`) or several."""

import signal
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from trivet.launcher.plan import ProcessSpec
from trivet.launcher.reports import RoleReports


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
        """Byte of the log at which this attempt's output starts."""
        ...

    @property
    def exit_code(self) -> int | None:
        """Exit code: None while it runs; -N when signal N ended it; `exits.NODE_LOST` when it was lost with its node."""
        ...

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to it and to what it started; nothing once it has ended."""
        ...

    def signal_leader(self, number: signal.Signals) -> None:
        """Send a signal to the role itself, not to what it started."""
        ...


class ProcessHost(Protocol):
    """The machine or the nodes on which the supervisor's processes run: all that it does to a process goes through here.

    No method waits for a node to answer.
    """

    def start(self, spec: ProcessSpec) -> HostedProcess:
        """Start a process; its output is appended to its log. What an earlier one reported is removed.

        Raises:
            OSError: the log cannot be written or the interpreter cannot be run.
        """
        ...

    def stop(
        self, processes: Sequence[HostedProcess], *, timeout_s: float, is_hurried: Callable[[], bool]
    ) -> Sequence[HostedProcess]:
        """End all: SIGTERM to every group at once, one deadline, then SIGKILL; return those that had to be killed.

        Args:
            is_hurried: asked while waiting; True ends the wait.
        """
        ...

    def adopt_orphans(self) -> None:
        """Become the parent of every descendant whose own parent ends; `end_orphans` finds them then."""
        ...

    def end_orphans(self, *, spared: Collection[HostedProcess] = ()) -> None:
        """Kill what outlived the processes that started it. To be called when those that ended have been waited for.

        Args:
            spared: those that go on, with all that descends from them.
        """
        ...

    def show_stacks(self, process: HostedProcess, pids: Iterable[int]) -> None:
        """Have processes that `process` started, or itself, write their stacks into their logs.

        Args:
            pids: as they were reported; one that does not descend from `process` is another's by now.
        """
        ...

    def find_stopped(self, processes: Sequence[HostedProcess]) -> Sequence[tuple[int, ...]]:
        """Return for each process the pids of those of its processes that a signal has stopped."""
        ...

    def lost_nodes(self) -> frozenset[int]:
        """Return the nodes of the run that are not there.

        Raises:
            RunDirectoryBusy: another node leads the run now.
        """
        ...

    def leaving_nodes(self) -> frozenset[int]:
        """Return the nodes, besides this one, that a signal has asked to end."""
        ...

    @property
    def has_nodes(self) -> bool:
        """True when there are more nodes than this one."""
        ...

    def read_reports(self, process: HostedProcess) -> RoleReports:
        """Return what its processes report now."""
        ...
