"""The driver's knowledge of its nodes: what each should run, what each has observed, and which are lost. It calls no node.

One lock guards it: the thread of `cluster.exchange` writes what it hears, and the supervisor asks and orders.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from trivet.cluster.messages import Desired, DesiredProcess, LogPart, Observed, ObservedProcess
from trivet.launcher.node_plan import Node
from trivet.launcher.plan import ProcessSpec
from trivet.wire.status import ProcessReport

_MAX_LOG_PARTS = 256
"""Parts of logs that wait to be written: 16 MiB at most. While the disk is full, nodes keep what follows."""
_MAX_CLOCK_DRIFT_S = 2.0
"""A node's clock that moved by more than this against the driver's was set anew; less is the delay of a message."""


@dataclass(slots=True, kw_only=True)
class _NodeState:
    listeners: tuple[str, ...]
    session: int = 0
    """The processes of an earlier session are lost."""
    num_sent: int = 0
    seen: float = 0.0
    """When the actor observed the newest state that was received, by the clock of its machine."""
    heard_at: float = 0.0
    observed: Observed | None = None
    """The newest state of the session; None while the node is lost."""
    processes: dict[int, DesiredProcess] = field(default_factory=dict[int, DesiredProcess])
    sweeps: int = 0
    ports: dict[str, int] = field(default_factory=dict[str, int])
    """The ports that it held last."""
    received: dict[str, int] = field(default_factory=dict[str, int])
    """Bytes of each log of the present actor that were received."""
    clock_offset: float = 0.0
    """The driver's clock minus the node's."""
    is_dirty: bool = True
    """Whether the node was not yet sent what it should run now."""

    def begin_session(self) -> None:
        self.session, self.seen = self.session + 1, 0.0
        self.observed, self.is_dirty = None, True
        self.processes.clear()


class NodeTable:
    """The nodes of a run.

    >>> table = NodeTable({0: ("transport",), 1: ("inference",)}, lost_after_s=30.0)
    >>> table.begin_session(1)
    >>> table.receive(1, observed, now=clock(), unix_time=time.time())
    >>> number, session = table.start(spec)
    >>> desired = table.next_message(1)
    """

    def __init__(self, listeners: Mapping[int, Sequence[str]], *, lost_after_s: float) -> None:
        """Begin with no node there.

        Args:
            listeners: names of what will listen on each node.
        """
        self._lost_after_s = lost_after_s
        self._nodes = {node: _NodeState(listeners=tuple(names)) for node, names in listeners.items()}
        self._num_processes = 0
        self._is_over = False
        self._draining: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self.log_parts = deque[LogPart]()
        """What was received of the logs of nodes and is not written yet. The supervisor's thread takes it away."""

    @property
    def nodes(self) -> Collection[int]:
        """The nodes that the run wants."""
        return self._nodes.keys()

    def begin_session(self, node: int) -> None:
        """Note that the actor of a node has ended, and its processes with it, or that another one takes part from now on."""
        with self._lock:
            self._nodes[node].begin_session()
            self._nodes[node].received.clear()  # another actor has another directory

    def receive(self, node: int, observed: Observed, *, now: float, unix_time: float) -> None:
        """Note what the actor of a node has observed.

        Args:
            unix_time: of the driver's clock.
        """
        with self._lock:
            state = self._nodes[node]
            self._expire(state, now=now)
            if observed.observed_at < state.seen:
                return  # it was overtaken
            state.seen = observed.observed_at
            if observed.session != state.session:
                state.is_dirty = True
                return
            state.heard_at, state.observed = now, observed
            state.ports |= observed.ports
            offset = unix_time - observed.time
            if abs(offset - state.clock_offset) > _MAX_CLOCK_DRIFT_S:
                state.clock_offset = offset
            for part in observed.logs:
                self._receive_log(state, part)

    def _receive_log(self, state: _NodeState, part: LogPart) -> None:
        """Keep the bytes of a part that are new. The node may have sent others before it knew that they had arrived."""
        received = state.received.get(part.name, 0)
        if 0 <= received - part.offset < len(part.data) and len(self.log_parts) < _MAX_LOG_PARTS:
            data = part.data[received - part.offset :]
            self.log_parts.append(msgspec.structs.replace(part, offset=received, data=data))
            state.received[part.name], state.is_dirty = received + len(data), True

    def is_lost(self, node: int, *, now: float) -> bool:
        """Return whether a node is not there, so that another actor may take its place."""
        with self._lock:
            self._expire(self._nodes[node], now=now)
            return self._nodes[node].observed is None

    def _expire(self, state: _NodeState, *, now: float) -> None:
        if state.observed is not None and now - state.heard_at > self._lost_after_s:
            state.begin_session()

    def next_message(self, node: int, *, only_news: bool = False) -> Desired | None:
        """Return all that a node should run, to be sent to it.

        Args:
            only_news: return None if the node was sent just that.
        """
        with self._lock:
            state = self._nodes[node]
            if only_news and not state.is_dirty:
                return None
            state.num_sent, state.is_dirty = state.num_sent + 1, False
            return Desired(
                session=state.session,
                number=state.num_sent,
                seen=state.seen,
                listeners=state.listeners,
                preferred_ports=dict(state.ports),
                processes=tuple(state.processes.values()),
                received=dict(state.received),
                sweeps=state.sweeps,
                is_over=self._is_over,
            )

    def finish(self) -> None:
        """Note that the run is over: every node should end its processes."""
        with self._lock:
            self._is_over = True
            for state in self._nodes.values():
                state.is_dirty = True

    @property
    def is_finished(self) -> bool:
        """Whether every node that is there has ended its processes and given back what it held."""
        with self._lock:
            return all(state.observed is None or state.observed.is_over for state in self._nodes.values())

    def start(self, spec: ProcessSpec, *, files: Mapping[str, str], now: float) -> tuple[int, int]:
        """Have a process started; return its number and the session of its node.

        Args:
            files: those of `DesiredProcess`.

        Raises:
            NodeLost: the node is not there.
        """
        with self._lock:
            state = self._nodes[spec.node]
            self._expire(state, now=now)
            if state.observed is None:
                raise NodeLost(spec.node)
            self._num_processes += 1
            for number in [number for number, process in state.processes.items() if process.spec.name == spec.name]:
                del state.processes[number]
            state.processes[self._num_processes] = DesiredProcess(number=self._num_processes, spec=spec, files=dict(files))
            state.is_dirty = True
            return self._num_processes, state.session

    def change(self, node: int, number: int, change: Callable[[DesiredProcess], DesiredProcess]) -> None:
        """Change what a node should do with a process. Nothing happens when the process was lost."""
        with self._lock:
            state = self._nodes[node]
            if (process := state.processes.get(number)) is not None:
                state.processes[number] = change(process)
                state.is_dirty = True

    def sweep(self, kept: Collection[int]) -> None:
        """Have every node kill what its processes left behind, and the processes that are not among `kept`."""
        with self._lock:
            for state in self._nodes.values():
                state.processes = {number: process for number, process in state.processes.items() if number in kept}
                state.sweeps, state.is_dirty = state.sweeps + 1, True

    def present(self, *, now: float) -> dict[int, Node]:
        """Return the nodes that are there and hold their ports."""
        with self._lock:
            there: dict[int, Node] = {}
            for index, state in self._nodes.items():
                self._expire(state, now=now)
                if state.observed is not None and state.observed.ports.keys() >= set(state.listeners):
                    there[index] = state.observed.facts.node(index, state.observed.ports)
            return there

    def observed(self, node: int, session: int, number: int, *, now: float) -> ObservedProcess | None:
        """Return what was observed of a process; None before its first sign.

        Raises:
            NodeLost: the node was lost since the process was started.
        """
        with self._lock:
            state = self._nodes[node]
            self._expire(state, now=now)
            if state.session != session or state.observed is None:
                raise NodeLost(node)
            return next((process for process in state.observed.processes if process.number == number), None)

    def reports_of(self, process: ObservedProcess, node: int) -> Sequence[ProcessReport]:
        """Return the reports of a process, with times of the driver's clock."""
        offset = self._nodes[node].clock_offset
        return [
            msgspec.structs.replace(report, time=report.time + offset, since=report.since + offset) if offset else report
            for report in process.reports
        ]

    def note_draining(self, machines: Collection[str]) -> None:
        """Note the machines that Ray is about to give back, by its ids."""
        with self._lock:
            self._draining = frozenset(machines)

    def leaving(self) -> frozenset[int]:
        """Return the nodes whose machines will be taken away, as Ray or the node itself knows."""
        with self._lock:
            there = {node: state.observed for node, state in self._nodes.items() if state.observed is not None}
            return frozenset(
                node for node, observed in there.items() if observed.is_leaving or observed.facts.ray_node in self._draining
            )

    def problems(self) -> dict[int, str]:
        """Return why a node does not hold the ports that it should."""
        with self._lock:
            return {
                node: state.observed.port_error
                for node, state in self._nodes.items()
                if state.observed is not None and state.observed.port_error
            }


class NodeLost(Exception):
    """Raised within the launcher when a node is asked for that is not there; `args[0]` is its index."""
