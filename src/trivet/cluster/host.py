"""The nodes of a run as the host of its processes: the supervisor starts and signals processes through it, wherever they are."""

import signal
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from trivet.cluster.messages import DesiredProcess, ObservedProcess, SentSignal
from trivet.cluster.own_directory import append_logs
from trivet.cluster.table import NodeLost, NodeTable
from trivet.exits import NODE_LOST
from trivet.launcher.node_plan import Node
from trivet.launcher.plan import ProcessSpec
from trivet.launcher.processes import SYSTEM_CLOCK, Clock, HostedProcess, LocalHost, RoleReports


class ClusterProcess:
    """A process that a node was told to start.

    >>> process = host.start(spec)
    >>> process.exit_code is None
    True
    """

    def __init__(self, table: NodeTable, spec: ProcessSpec, *, files: Mapping[str, str], clock: Callable[[], float]) -> None:
        self.spec = spec
        self.log_offset = spec.log.stat().st_size if spec.log.exists() else 0
        """Byte of the log at which its output starts, as the driver sees the file."""
        self.number = 0
        """Its number among the processes of the run; 0 when its node was lost before it could be started."""
        self._table = table
        self._clock = clock
        self._session = 0
        self._exit_code: int | None = None
        try:
            self.number, self._session = table.start(spec, files=files, now=clock())
        except NodeLost:
            self._exit_code = NODE_LOST

    @property
    def pid(self) -> int:
        """Process id on its node; 0 until the node has told it."""
        observed = self.observed()
        return observed.pid if observed is not None else 0

    @property
    def exit_code(self) -> int | None:
        """Exit code: None while it runs or is about to; NODE_LOST when it was lost with its node. Its log is complete then."""
        if self._exit_code is None and (observed := self.observed()) is not None:
            append_logs(self._table.log_parts, self.spec.log.parent)
            self._exit_code = observed.exit_code
        return self._exit_code

    def signal_group(self, number: signal.Signals) -> None:
        """Have a signal sent to it and to what it started; nothing once it has ended."""
        self._signal(SentSignal(number=number, does_reach_group=True))

    def signal_leader(self, number: signal.Signals) -> None:
        """Have a signal sent to the role itself."""
        self._signal(SentSignal(number=number, does_reach_group=False))

    def _signal(self, sent: SentSignal) -> None:
        self._change(lambda process: msgspec.structs.replace(process, signals=(*process.signals, sent)))

    def show_stacks(self, pids: Iterable[int]) -> None:
        """Have processes write their stacks into their logs."""
        asked = tuple(pids)
        self._change(lambda process: msgspec.structs.replace(process, shown_stacks=(*process.shown_stacks, asked)))

    def read_reports(self) -> RoleReports:
        """Return what the processes of the role report."""
        if (observed := self.observed()) is None:
            return RoleReports()
        return RoleReports(readable=tuple(self._table.reports_of(observed, self.spec.node)), stamps=observed.stamps)

    def _change(self, change: Callable[[DesiredProcess], DesiredProcess]) -> None:
        if self.exit_code is None:
            self._table.change(self.spec.node, self.number, change)

    def observed(self) -> ObservedProcess | None:
        """Return what its node has observed of it last; None before its first sign, and once the node was lost."""
        if self._exit_code == NODE_LOST:
            return None
        try:
            return self._table.observed(self.spec.node, self._session, self.number, now=self._clock())
        except NodeLost:
            self._exit_code = NODE_LOST if self._exit_code is None else self._exit_code
            return None


class ClusterHost:
    """Several nodes as a `launcher.processes.ProcessHost`.

    >>> host = ClusterHost(table)
    >>> host.lost_nodes()
    frozenset({1})
    """

    def __init__(
        self,
        table: NodeTable,
        *,
        check: Callable[[], None] = lambda: None,
        read_files: Callable[[ProcessSpec], Mapping[str, str]] = lambda _: {},
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Begin with no process.

        Args:
            check: raises when this driver must not lead the run any more.
            read_files: returns the files that a process reads from the output directory and its node does not see.
        """
        self._table = table
        self._check = check
        self._read_files = read_files
        self._known: frozenset[int] = frozenset()
        self._clock = clock

    def nodes(self) -> dict[int, Node]:
        """Return the nodes that are there and hold their ports."""
        return self._table.present(now=self._clock.now())

    def lost_nodes(self) -> frozenset[int]:
        """Return the nodes that are not there, or not yet with their ports.

        Raises:
            NodesMissing: this driver has lost the cluster or the shared directory.
        """
        self._check()
        return frozenset(self._table.nodes).difference(self.nodes())

    def leaving_nodes(self) -> frozenset[int]:
        """Return the nodes that were asked to end."""
        return self._table.leaving()

    def joined_nodes(self) -> frozenset[int]:
        """Return the nodes that came for the first time since the last call."""
        joined = frozenset(self.nodes()) - self._known
        self._known |= joined
        return joined

    def start(self, spec: ProcessSpec) -> ClusterProcess:
        """Start a process on its node, as `ProcessHost.start`."""
        return ClusterProcess(self._table, spec, files=self._read_files(spec), clock=self._clock.now)

    def stop(
        self, processes: Sequence[HostedProcess], *, timeout_s: float, is_hurried: Callable[[], bool] = lambda: False
    ) -> Sequence[HostedProcess]:
        """End all processes, as `ProcessHost.stop`."""
        return LocalHost.stop(processes, timeout_s=timeout_s, is_hurried=is_hurried, clock=self._clock)

    def end_orphans(self, *, spared: Collection[HostedProcess] = ()) -> None:
        """Kill what outlived the processes that started it, on every node."""
        self._table.sweep({process.number for process in spared if isinstance(process, ClusterProcess)})

    def find_stopped(self, processes: Sequence[HostedProcess]) -> list[tuple[int, ...]]:
        """Return the stopped processes of each, as `ProcessHost.find_stopped`."""
        found = [process.observed() for process in processes if isinstance(process, ClusterProcess)]
        return [observed.stopped if observed is not None else () for observed in found]
