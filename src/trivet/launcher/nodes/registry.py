"""The head's side of the nodes of a run: who is there, what each holds and runs, and the orders that each has not carried out.

`NodeRegistry` decides and keeps state; it opens no socket and reads no clock (`launcher.nodes.control` does). One lock guards it:
the thread that receives writes to it, the supervisor asks it.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from trivet.cluster.table import NodeLost
from trivet.launcher.node_plan import Node
from trivet.launcher.nodes.messages import Beat, Hello, Order, Orders, Refused, RemoteState
from trivet.wire.status import ProcessReport

_MAX_CLOCK_DRIFT_S = 2.0
"""An agent's clock that moved by more than this against the head's was set anew; less is the delay of a message."""


@dataclass(slots=True, kw_only=True)
class _Agent:
    """One agent. A node that comes back has another one."""

    key: bytes
    """The name under which its messages arrive."""
    hello: Hello
    heard_at: float
    orders: list[Order] = field(default_factory=list[Order])
    num_done: int = 0
    newest_beat: int = 0
    clock_offset: float = 0.0
    """The head's clock minus the agent's."""
    ports: dict[str, int] = field(default_factory=dict[str, int])
    port_error: str = ""
    is_leaving: bool = False
    processes: dict[int, RemoteState] = field(default_factory=dict[int, RemoteState])
    is_lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refusal:
    name: str
    """Host name of the agent."""
    reason: str
    at: float


class NodeRegistry:
    """The nodes of a run besides the head's own.

    >>> registry = NodeRegistry({1: 8, 2: 8}, config_digest=digest, version=version, lost_after_s=30.0)
    >>> registry.receive(key, Hello(...), now=clock())
    >>> registry.order(1, StartProcess.of(spec))
    1
    >>> answer = registry.receive(key, Beat(...), now=clock())
    """

    def __init__(self, num_gpus: Mapping[int, int], *, config_digest: str, version: str, lost_after_s: float) -> None:
        """Begin with no node.

        Args:
            num_gpus: the GPUs that each node needs, by its index.
        """
        self._num_gpus = num_gpus
        self._config_digest = config_digest
        self._version = version
        self._lost_after_s = lost_after_s
        self._agents: dict[int, _Agent] = {}
        self._replaced: set[str] = set()
        """Agents in whose place another agent of the same node has come: they must not take it back."""
        self._refusals: dict[int, _Refusal] = {}
        """The newest refusal of each node, until an agent of the node is welcomed."""
        self._error: Exception | None = None
        self._lock = threading.Lock()

    def fail(self, error: Exception) -> None:
        """Note that no message can be taken any more: `check` raises `error`."""
        self._error = error

    def check(self) -> None:
        """Raise what ended the thread that takes messages."""
        if self._error is not None:
            raise self._error

    def receive(self, key: bytes, message: Hello | Beat, *, now: float, unix_time: float) -> Orders | Refused:
        """Take a message; return the answer.

        Args:
            key: the name of the agent that sent it.
            unix_time: of the head's clock.
        """
        with self._lock:
            if isinstance(message, Hello):
                if refusal := self._why_refused(key, message, now=now):
                    self._refusals[message.index] = _Refusal(name=message.name, reason=refusal.reason, at=now)
                    return refusal
                self._refusals.pop(message.index, None)
                agent = self._agents.get(message.index)
                if agent is not None and agent.hello.instance != message.instance:
                    self._replaced.add(agent.hello.instance)
                if agent is None or agent.key != key:
                    agent = self._agents[message.index] = _Agent(key=key, hello=message, heard_at=now)
            else:
                agent = next((each for each in self._agents.values() if each.key == key), None)
                if agent is None or self._is_lost(agent, now=now):
                    return Refused(reason="the head counted this node as lost; its agent must begin anew")
                self._note(agent, message, unix_time=unix_time)
            agent.heard_at = now
            return Orders(
                beat=agent.newest_beat,
                first=agent.num_done + 1,
                orders=agent.orders[agent.num_done :],
                lost_after_s=self._lost_after_s,
            )

    def _why_refused(self, key: bytes, hello: Hello, *, now: float) -> Refused | None:
        if hello.index not in self._num_gpus:
            return Refused(reason=f"the run has no node {hello.index}", is_final=True)
        if hello.instance in self._replaced:
            return Refused(reason="another agent of this node has taken its place", is_final=True)
        if hello.version != self._version:
            return Refused(
                reason=f"it has trivet {hello.version}, the first node {self._version}: install one version on all nodes",
                is_final=True,
            )
        if hello.config_digest != self._config_digest:
            return Refused(
                reason="it reads another configuration than the first node: start the same command on all nodes",
                is_final=True,
                is_old_start=True,
            )
        if not hello.does_see_lock:
            return Refused(
                reason="it does not see that the first node has locked the output directory: mount the shared file system so that"
                " locks hold between machines, or choose an output_dir where they do",
                is_final=hello.index not in self._agents,  # else it saw the lock before, and may again
            )
        if len(hello.gpus) < (needed := self._num_gpus[hello.index]):
            return Refused(
                reason=f"it shows {len(hello.gpus)} GPU(s), and deployment.gpus_per_node is {needed}: lower that, or ask the"
                " scheduler for nodes that have them",
                is_final=True,
            )
        agent = self._agents.get(hello.index)
        if agent is not None and agent.key != key and not self._is_lost(agent, now=now) and agent.hello.name != hello.name:
            return Refused(reason=f"{agent.hello.name} is node {hello.index} already")
        return None

    @staticmethod
    def _note(agent: _Agent, beat: Beat, *, unix_time: float) -> None:
        if beat.number <= agent.newest_beat:
            return  # a message that was overtaken
        agent.newest_beat, agent.num_done = beat.number, max(agent.num_done, beat.num_done)
        offset = unix_time - beat.time
        if abs(offset - agent.clock_offset) > _MAX_CLOCK_DRIFT_S:
            agent.clock_offset = offset
        agent.ports, agent.port_error = beat.ports, beat.port_error
        agent.is_leaving = beat.is_leaving
        agent.processes = {state.order: state for state in beat.processes}

    def _is_lost(self, agent: _Agent, *, now: float) -> bool:
        if now - agent.heard_at > self._lost_after_s:
            agent.is_lost = True
        return agent.is_lost

    def order(self, node: int, order: Order, *, key: bytes | None = None) -> int:
        """Have the agent of `node` carry out `order`; return the order's number.

        Args:
            key: the agent that is meant; None: whichever the node has.

        Raises:
            NodeLost: that agent is not there.
        """
        with self._lock:
            agent = self._agents.get(node)
            if agent is None or key not in (None, agent.key):
                raise NodeLost(node)
            agent.orders.append(order)
            return len(agent.orders)

    def present(self, *, now: float) -> dict[int, Node]:
        """Return the nodes that are there, by their indices."""
        with self._lock:
            return {
                index: agent.hello.node(agent.ports)
                for index, agent in sorted(self._agents.items())
                if not self._is_lost(agent, now=now)
            }

    def key_of(self, node: int) -> bytes | None:
        """Return the name of the agent of a node; None when there never was one."""
        with self._lock:
            agent = self._agents.get(node)
            return agent.key if agent is not None else None

    def state_of(self, node: int, key: bytes, order: int, *, now: float) -> RemoteState | None:
        """Return what is known of the process that `order` started; None before its first sign.

        Args:
            key: the agent that was given the order.

        Raises:
            NodeLost: that agent is not there any more.
        """
        with self._lock:
            agent = self._agents.get(node)
            if agent is None or agent.key != key or self._is_lost(agent, now=now):
                raise NodeLost(node)
            return agent.processes.get(order)

    def reports_of(
        self, node: int, key: bytes | None, order: int
    ) -> tuple[Sequence[ProcessReport], Mapping[str, tuple[int, int] | None]]:
        """Return the reports of a process, with times of the head's clock, and their stamps."""
        with self._lock:
            agent = self._agents.get(node)
            state = agent.processes.get(order) if agent is not None and agent.key == key else None
            if agent is None or state is None:
                return (), {}
            return tuple(_shift(report, agent.clock_offset) for report in state.reports), state.stamps

    def leaving(self) -> frozenset[int]:
        """Return the nodes that a signal has asked to end."""
        with self._lock:
            return frozenset(index for index, agent in self._agents.items() if agent.is_leaving and not agent.is_lost)

    def problems(self, *, now: float) -> Sequence[str]:
        """Return why nodes were refused, or do not hold the ports that they were asked for.

        The refusal of an agent whose node has another one is left out once that agent no longer asks.
        """
        with self._lock:
            there = {index for index, agent in self._agents.items() if not self._is_lost(agent, now=now)}
            refused = [
                f"node {index} ({refusal.name}) is refused: {refusal.reason}"
                for index, refusal in sorted(self._refusals.items())
                if index not in there or now - refusal.at <= self._lost_after_s
            ]
            return refused + [
                f"node {index} ({agent.hello.name}): {agent.port_error}"
                for index, agent in sorted(self._agents.items())
                if agent.port_error
            ]

    def have_all_done(self) -> bool:
        """Return whether every node that is there has carried out all its orders."""
        with self._lock:
            return all(agent.is_lost or agent.num_done == len(agent.orders) for agent in self._agents.values())


def _shift(report: ProcessReport, seconds: float) -> ProcessReport:
    return msgspec.structs.replace(report, time=report.time + seconds, since=report.since + seconds) if seconds else report
