"""The nodes of a simulated cluster: their actors, a stand-in for Ray, and processes that are only objects."""

import itertools
import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from support.fake_roles import make_facts
from trivet.cluster.fence import is_missed
from trivet.cluster.node_processes import NodeProcesses
from trivet.cluster.table import NodeTable
from trivet.launcher.plan import ProcessSpec
from trivet.launcher.processes import Clock, RoleReports
from trivet.wire.status import RUNNING_GROUPS, ProcessReport
from trivet.wire.versions import Step

if TYPE_CHECKING:
    from support.simulated_cluster import SimulatedCluster

PORT = 4000
"""The first port of every node."""
EXCHANGE_INTERVAL_S = 25.0
"""The cluster exchanges states at least this often, though nobody looks: a node that is silent for longer may count as lost."""
_RECENT_S = 4.0
"""A node without news, which was asked so recently, is not asked. Together with the interval it is shorter than `lost_after_s`."""
_ACTOR_START_S = 8.0
"""From a free bundle until its new actor answers: measured with imports under load."""
_ACTOR_ENDED_S = 0.5
"""From the end of an actor's process until Ray says so."""


@dataclass(kw_only=True, eq=False)
class SimulatedProcess:
    """A process that is only what it is said to be."""

    spec: ProcessSpec
    pid: int
    cluster: "SimulatedCluster"
    attempt: int
    started_at: float
    exit_code: int | None = None
    said: ProcessReport | None = None

    def signal_group(self, number: signal.Signals) -> None:
        if self.exit_code is not None:
            return
        self.cluster.training.stopping(self)
        if number == signal.SIGKILL:
            self.end(-number)
        else:
            self.cluster.timeline.after(self.cluster.plan.term_s, lambda: self.end(128 + number))

    signal_leader = signal_group

    def end(self, code: int) -> None:
        if self.exit_code is None:
            self.exit_code = code
            self.cluster.training.ended(self)

    def show_stacks(self, pids: Iterable[int]) -> None: ...

    def read_reports(self) -> RoleReports:
        """Return what a role says each second, of every process that reports."""
        now, training, name = self.cluster.timeline.now, self.cluster.training, self.spec.name
        step = Step(training.step) if self.spec.does_finish else Step(0)
        activity = RUNNING_GROUPS if training.is_serving(name) else ""
        if self.said is None or (self.said.step, self.said.activity) != (step, activity):
            self.said = ProcessReport(
                role=name, pid=self.pid, attempt=self.attempt, time=now, since=self.started_at, step=step, activity=activity
            )
        return RoleReports(readable=(self.said,), stamps={report.process: (self.pid, int(now)) for report in self.spec.reports})


@dataclass(kw_only=True)
class SimulatedHost:
    """The processes of one node, as a `LocalHost`."""

    cluster: "SimulatedCluster"
    running: list[SimulatedProcess] = field(default_factory=list)

    def start(self, spec: ProcessSpec) -> SimulatedProcess:
        cluster = self.cluster
        process = SimulatedProcess(
            spec=spec,
            pid=next(cluster.pids),
            cluster=cluster,
            attempt=cluster.training.attempt,
            started_at=cluster.timeline.now,
        )
        self.running = [other for other in self.running if other.exit_code is None] + [process]
        cluster.training.started(process)
        return process

    def end_all(self) -> None:
        """Lose every process at once."""
        for process in self.running:
            process.end(-signal.SIGKILL)

    def end_orphans(self, *, spared: Collection[SimulatedProcess] = ()) -> None: ...

    def find_stopped(self, processes: Sequence[SimulatedProcess]) -> list[tuple[int, ...]]:
        return [()] * len(processes)


class DirectReader:
    """Reads reports when they are asked for, where a node has a thread."""

    def __init__(self) -> None:
        self._children: dict[int, Any] = {}

    def follow(self, order: int, child: Any) -> None:
        self._children[order] = child

    def forget(self, order: int) -> None:
        self._children.pop(order, None)

    def newest(self, order: int) -> RoleReports:
        return self._children[order].read_reports()


class SimulatedActor:
    """The actor of one node: what runs its processes and its contact with the driver are real."""

    def __init__(self, cluster: "SimulatedCluster", node: int, *, machine: int) -> None:
        self._timeline = cluster.timeline
        self._node = node
        free = itertools.count(PORT)
        self.host = SimulatedHost(cluster=cluster)
        self._lost_after_s = cluster.config.deployment.lost_after_s
        self._contact_at = self._timeline.now
        self._processes = NodeProcesses(
            host=self.host,  # type: ignore[arg-type]  # acts as one
            facts=make_facts(f"host-{node}", host=address_of(node), ray_node=f"{machine}", num_gpus=8),
            ports=SimpleNamespace(reserve=lambda _, preferred: preferred or next(free)),  # type: ignore[arg-type]
            scratch=SimpleNamespace(redirect=lambda spec: spec),  # type: ignore[arg-type]
            say=lambda _: None,
            clock=Clock(now=lambda: self._timeline.now, unix_time=lambda: self._timeline.now),
        )
        self._exchanged_at = -_RECENT_S
        self._exit_codes: tuple[int | None, ...] = ()

    def exchange(self, table: NodeTable, *, must: bool = False) -> None:
        """Take what the node should run and answer with what it runs, if there is news of one of them or the time has come."""
        now, own = self._timeline.now, self._processes
        must = must or now - self._exchanged_at >= _RECENT_S or own.exit_codes != self._exit_codes
        if (desired := table.next_message(self._node, only_news=not must)) is None:
            return
        self._contact_at = max(self._contact_at, desired.seen)
        own.apply(desired)
        observed = own.observe()
        table.receive(self._node, observed, now=now, unix_time=now)
        self._exchanged_at, self._exit_codes = now, own.exit_codes

    def check_fence(self) -> None:
        """End the processes of the node if it misses the driver."""
        if is_missed(self._contact_at, lost_after_s=self._lost_after_s, now=self._timeline.now):
            self.host.end_all()


class SimulatedRay:
    """Places an actor in the bundle of each node, and replaces it, as `cluster.exchange` has Ray do it."""

    def __init__(self, cluster: "SimulatedCluster", table: NodeTable, machines: Mapping[int, int]) -> None:
        """Begin with no actor.

        Args:
            machines: the machine of each node.
        """
        self._cluster = cluster
        self._timeline = cluster.timeline
        self._table = table
        self._machines = machines
        self.actors: dict[int, SimulatedActor] = {}

    def place_all(self) -> None:
        """Have an actor made for each node that has none and whose machine is there."""
        for node in self._machines:
            self._place(node)

    def _place(self, node: int) -> None:
        if not self._is_wanted(node):
            return
        if self._table.is_lost(node, now=self._timeline.now):
            self._timeline.after(_ACTOR_START_S, lambda: self._begin(node))
        else:  # it was silent for a moment only: its processes may run
            self._timeline.after(1.0, lambda: self._place(node))

    def _is_wanted(self, node: int) -> bool:
        cluster = self._cluster
        return cluster.ray is self and node not in self.actors and self._machines[node] not in cluster.gone

    def _begin(self, node: int) -> None:
        if self._is_wanted(node):
            self._table.begin_session(node)
            self.actors[node] = SimulatedActor(self._cluster, node, machine=self._machines[node])

    def lose(self, machine: int) -> None:
        """Lose the actors of a machine with all that they run, just after their last answer."""
        for node in [node for node in self.actors if self._machines[node] == machine]:
            actor = self.actors.pop(node)
            actor.exchange(self._table, must=True)
            actor.host.end_all()

    def end_actor(self, node: int) -> None:
        """End the process of an actor whose machine Ray still reaches."""
        self.actors.pop(node).host.end_all()
        self._timeline.after(_ACTOR_ENDED_S, lambda: (self._table.begin_session(node), self._place(node)))

    def exchange(self, *, must: bool = False) -> None:
        """Exchange states with every node that the driver reaches. A node that is cut off watches itself."""
        for node, actor in self.actors.items():
            if self._machines[node] in self._cluster.cut_off:
                actor.check_fence()
            else:
                actor.exchange(self._table, must=must)


def address_of(index: int) -> str:
    """Return the address of a node."""
    return f"10.0.{index // 256}.{index % 256}"
