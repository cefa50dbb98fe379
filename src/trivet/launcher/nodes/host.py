"""The nodes of a run as the host of its processes: those of the first node are started here, all others by the agents."""

import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress

from trivet.cluster.table import NodeLost
from trivet.exits import NODE_LOST
from trivet.launcher.node_plan import Node
from trivet.launcher.nodes.messages import EndOrphans, EndRun, HoldPorts, RemoteState, ShowStacks, SignalProcess, StartProcess
from trivet.launcher.nodes.registry import NodeRegistry
from trivet.launcher.placement import HEAD
from trivet.launcher.plan import ProcessSpec
from trivet.launcher.processes import HostedProcess, LocalHost, RoleReports

_POLL_INTERVAL_S = 0.1
_END_TIMEOUT_S = 10.0
"""How long agents have to hear that the run is over. One that does not ends itself when it misses the head."""


class RemoteProcess:
    """A process that an agent was told to start.

    >>> process = host.start(spec)
    >>> process.exit_code is None
    True
    """

    def __init__(self, registry: NodeRegistry, spec: ProcessSpec, *, clock: Callable[[], float]) -> None:
        self.spec = spec
        self.log_offset = spec.log.stat().st_size if spec.log.exists() else 0
        """Byte of the log at which its output starts, as this node sees the file."""
        self._registry = registry
        self._clock = clock
        self.agent = registry.key_of(spec.node)
        """The name of the agent that was told to start it."""
        self._exit_code: int | None = None
        self.order = 0
        """The number of the order that started it; 0 when its node was lost before."""
        try:
            self.order = registry.order(spec.node, StartProcess.of(spec), key=self.agent)
        except NodeLost:
            self._exit_code = NODE_LOST

    @property
    def pid(self) -> int:
        """Process id on its node; 0 until the agent has told it."""
        state = self._state()
        return state.pid if state is not None else 0

    @property
    def exit_code(self) -> int | None:
        """Exit code: None while it runs or is about to; NODE_LOST when it was lost with its node."""
        if self._exit_code is None and (state := self._state()) is not None:
            self._exit_code = state.exit_code
        return self._exit_code

    @property
    def stopped(self) -> tuple[int, ...]:
        """Pids of those of its processes that a signal has stopped."""
        state = self._state()
        return state.stopped if state is not None else ()

    def signal_group(self, number: signal.Signals) -> None:
        """Have a signal sent to it and to what it started; nothing once it has ended."""
        self._signal(number, does_reach_group=True)

    def signal_leader(self, number: signal.Signals) -> None:
        """Have a signal sent to the role itself."""
        self._signal(number, does_reach_group=False)

    def _signal(self, number: signal.Signals, *, does_reach_group: bool) -> None:
        if self.exit_code is not None:
            return
        order = SignalProcess(process=self.order, signal=number, does_reach_group=does_reach_group)
        with suppress(NodeLost):  # the next look at its exit code says so
            self._registry.order(self.spec.node, order, key=self.agent)

    def _state(self) -> RemoteState | None:
        if self.agent is None:
            return None
        try:
            return self._registry.state_of(self.spec.node, self.agent, self.order, now=self._clock())
        except NodeLost:
            self._exit_code = NODE_LOST if self._exit_code is None else self._exit_code
            return None


class NodeHost:
    """Several nodes as a `launcher.processes.ProcessHost`.

    >>> host = NodeHost(LocalHost(python=sys.executable, environ=environ), registry, wanted={1: ("inference",)})
    >>> host.lost_nodes()
    frozenset({1})
    """

    def __init__(
        self,
        local: LocalHost,
        registry: NodeRegistry,
        *,
        wanted: Mapping[int, Sequence[str]],
        check: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Begin with no process.

        Args:
            wanted: the names of what will listen on each node, by its index.
            check: raises when this node must not lead the run any more.
        """
        self._local = local
        self._check = check
        self._registry = registry
        self._wanted = wanted
        self._asked: dict[int, bytes] = {}
        """The agent of each node that was asked to hold its ports."""
        self._ports: dict[int, dict[str, int]] = {}
        """The ports that each node held last."""
        self._clock = clock
        self._sleep = sleep

    def nodes(self) -> dict[int, Node]:
        """Return the other nodes that are there and hold their ports, by their indices. One that came is asked to."""
        there: dict[int, Node] = {}
        for index, node in self._registry.present(now=self._clock()).items():
            names, agent = self._wanted[index], self._registry.key_of(index)
            if agent is not None and self._asked.get(index) != agent:
                # A node that comes back should be found where it was.
                self._registry.order(index, HoldPorts(names=tuple(names), preferred=self._ports.get(index, {})))
                self._asked[index] = agent
            elif node.ports.keys() >= set(names):
                there[index] = node
                self._ports[index] = dict(node.ports)
        return there

    def lost_nodes(self) -> frozenset[int]:
        """Return the nodes that are not there, or not yet with their ports.

        Raises:
            RunDirectoryBusy: another node leads the run now.
        """
        self._check()
        self._registry.check()
        return frozenset(self._wanted) - self.nodes().keys()

    @staticmethod
    def joined_nodes() -> frozenset[int]:
        """Return no node: the run waits for all at its start."""
        return frozenset()

    def leaving_nodes(self) -> frozenset[int]:
        """Return the nodes that a signal has asked to end."""
        return self._registry.leaving()

    def start(self, spec: ProcessSpec) -> HostedProcess:
        """Start a process on its node, as `ProcessHost.start`."""
        return self._local.start(spec) if spec.node == HEAD else RemoteProcess(self._registry, spec, clock=self._clock)

    def stop(
        self, processes: Sequence[HostedProcess], *, timeout_s: float, is_hurried: Callable[[], bool] = lambda: False
    ) -> Sequence[HostedProcess]:
        """End all processes, as `ProcessHost.stop`."""
        return self._local.stop(processes, timeout_s=timeout_s, is_hurried=is_hurried)

    def end_orphans(self, *, spared: Collection[HostedProcess] = ()) -> None:
        """Kill what outlived the processes that started it, on every node."""
        self._local.end_orphans(spared=[process for process in spared if process.spec.node == HEAD])
        for node in self._registry.present(now=self._clock()):
            kept = tuple(each.order for each in spared if isinstance(each, RemoteProcess) and each.spec.node == node)
            self._registry.order(node, EndOrphans(spared=kept))

    def show_stacks(self, process: HostedProcess, pids: Iterable[int]) -> None:
        """Have processes write their stacks into their logs, as `ProcessHost.show_stacks`."""
        if not isinstance(process, RemoteProcess):
            self._local.show_stacks(process, pids)
        elif process.exit_code is None:
            with suppress(NodeLost):
                self._registry.order(process.spec.node, ShowStacks(process=process.order, pids=tuple(pids)), key=process.agent)

    def find_stopped(self, processes: Sequence[HostedProcess]) -> list[tuple[int, ...]]:
        """Return the stopped processes of each, as `ProcessHost.find_stopped`."""
        own = [process for process in processes if not isinstance(process, RemoteProcess)]
        found = dict(zip(map(id, own), self._local.find_stopped(own), strict=True))
        return [process.stopped if isinstance(process, RemoteProcess) else found[id(process)] for process in processes]

    def read_reports(self, process: HostedProcess) -> RoleReports:
        """Return what the processes of a role report, as `ProcessHost.read_reports`."""
        if not isinstance(process, RemoteProcess):
            return self._local.read_reports(process)
        reports, stamps = self._registry.reports_of(process.spec.node, process.agent, process.order)
        return RoleReports(readable=tuple(reports), stamps=stamps)

    def end_run(self, exit_code: int) -> None:
        """Tell every agent that the run is over, and wait until they have heard it or a moment has passed."""
        for node in self._registry.present(now=self._clock()):
            self._registry.order(node, EndRun(exit_code=exit_code))
        deadline = self._clock() + _END_TIMEOUT_S
        while not self._registry.have_all_done() and self._clock() < deadline:
            self._sleep(_POLL_INTERVAL_S)
