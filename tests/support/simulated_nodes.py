"""The nodes of a simulated cluster: the real agent on each, and processes that are only what they are said to be."""

import itertools
import signal
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trivet.launcher.nodes.agent import NodeAgent
from trivet.launcher.nodes.head_contact import HeadContact
from trivet.launcher.nodes.messages import Hello, Orders
from trivet.launcher.plan import ProcessSpec
from trivet.launcher.processes import HostedProcess, RoleReports
from trivet.wire.status import ProcessReport
from trivet.wire.versions import Step

if TYPE_CHECKING:
    from support.simulated_cluster import SimulatedCluster

NUM_CPUS = 192
FIRST_PORT = 4000
"""Every node has the same ports free, in this order."""


@dataclass(kw_only=True, eq=False)
class SimulatedProcess:
    """A process that is only what it is said to be."""

    spec: ProcessSpec
    pid: int
    cluster: "SimulatedCluster"
    log_offset: int = 0
    exit_code: int | None = None
    started_at: float = 0.0
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

    def reports(self) -> RoleReports:
        """Return what a role says each second, of every process that reports."""
        now, training = self.cluster.timeline.now, self.cluster.training
        stamps = {report.process: (self.pid, int(now)) for report in self.spec.reports}
        if self.said is None or (self.spec.does_finish and self.said.step != training.step):
            name, step = self.spec.name, Step(training.step) if self.spec.does_finish else Step(0)
            self.said = ProcessReport(
                role=name, pid=self.pid, attempt=training.attempt, time=now, since=self.started_at, step=step
            )
        return RoleReports(readable=(self.said,), stamps=stamps)


@dataclass(kw_only=True)
class SimulatedHost:
    """The processes of one node, as a `LocalHost`."""

    cluster: "SimulatedCluster"
    running: list[SimulatedProcess] = field(default_factory=list)

    def start(self, spec: ProcessSpec) -> SimulatedProcess:
        cluster = self.cluster
        process = SimulatedProcess(spec=spec, pid=next(cluster.pids), cluster=cluster, started_at=cluster.timeline.now)
        self.running = [other for other in self.running if other.exit_code is None] + [process]
        cluster.training.started(process)
        return process

    def stop(
        self, processes: Sequence[HostedProcess], *, timeout_s: float, is_hurried: Callable[[], bool] = lambda: False
    ) -> Sequence[HostedProcess]:
        for process in processes:
            process.signal_group(signal.SIGKILL)
        return []

    def end_all(self) -> None:
        """Lose every process at once."""
        for process in self.running:
            process.end(-signal.SIGKILL)
        self.running.clear()

    def end_orphans(self, *, spared: Collection[HostedProcess] = ()) -> None: ...

    def show_stacks(self, process: HostedProcess, pids: Iterable[int]) -> None: ...

    def find_stopped(self, processes: Sequence[HostedProcess]) -> list[tuple[int, ...]]:
        return [()] * len(processes)

    def lost_nodes(self) -> frozenset[int]:
        return frozenset()

    leaving_nodes = lost_nodes

    def read_reports(self, process: SimulatedProcess) -> RoleReports:
        return process.reports()


class _Ports:
    def __init__(self) -> None:
        self._free = itertools.count(FIRST_PORT)

    def reserve(self, host: str, *, preferred: int) -> int:
        return preferred or next(self._free)


class DirectReader:
    """Reads reports when they are asked for, where an agent has a thread."""

    def __init__(self, read: Callable[[Any], RoleReports]) -> None:
        self._read = read
        self._children: dict[int, Any] = {}

    def follow(self, order: int, child: Any) -> None:
        self._children[order] = child

    def forget(self, order: int) -> None:
        self._children.pop(order, None)

    def newest(self, order: int) -> RoleReports:
        return self._read(self._children[order])

    def close(self) -> None: ...


class SameScratch:
    def redirect(self, spec: ProcessSpec) -> ProcessSpec:
        return spec


class SimulatedNode:
    """A node that is not the first: the real agent, which speaks to the head's registry without sockets."""

    def __init__(self, cluster: "SimulatedCluster", index: int) -> None:
        self._cluster = cluster
        self.index = index
        self.host = SimulatedHost(cluster=cluster)
        self.is_there = True
        self._life = 0
        self._agent: NodeAgent | None = None

    @property
    def _key(self) -> bytes:
        return b"%d/%d" % (self.index, self._life)

    def join(self) -> None:
        """Start the command of this node: introduce a new agent to the head."""
        cluster, self._life = self._cluster, self._life + 1
        self.is_there = True
        self.host.end_all()
        hello = Hello(
            index=self.index,
            name=f"host-{self.index}-{self._life}",
            host=address_of(self.index),
            interface="eth0",
            gpus=cluster.gpus,
            num_cpus=NUM_CPUS,
            instance=f"{self.index}/{self._life}",
            version="1",
            config_digest="same",
            does_see_lock=True,
        )
        now = cluster.timeline.now
        answer = cluster.registry.receive(self._key, hello, now=now, unix_time=now)
        if not isinstance(answer, Orders):  # its last agent is not counted as lost yet
            cluster.timeline.after(1.0, self.join)
            return
        self._contact = HeadContact(lost_after_s=answer.lost_after_s, now=now)
        self._agent = NodeAgent(
            self.index,
            host=self.host,  # type: ignore[arg-type]  # acts as one
            bind=address_of(self.index),
            ports=_Ports(),  # type: ignore[arg-type]
            scratch=SameScratch(),  # type: ignore[arg-type]
            open_log=lambda: cluster.log,
            unix_time=lambda: cluster.timeline.now,
        )
        self._agent.say = lambda message: None  # type: ignore[method-assign]

    def beat(self) -> None:
        """Say how this node stands, and carry out what the head answers."""
        agent = self._agent
        if agent is None:
            return
        now = self._cluster.timeline.now
        beat = agent.beat()
        self._contact.sent(beat.number, now=now)
        answer = self._cluster.registry.receive(self._key, beat, now=now, unix_time=now)
        if not isinstance(answer, Orders):
            self.host.end_all()
            self._agent = None
            self.join()
            return
        self._contact.seen(answer.beat)
        agent.carry_out(answer)

    def miss_head(self) -> bool:
        """Do what an agent does that hears nothing; return whether it is gone."""
        now = self._cluster.timeline.now
        if self._contact.must_end_processes(now=now):
            self.host.end_all()
        return self._contact.must_end_agent(now=now)

    def lose(self) -> None:
        """Lose the node with all that runs on it, just after its last message."""
        self.beat()
        self.is_there, self._agent = False, None
        self.host.end_all()


def address_of(index: int) -> str:
    """Return the address of a node."""
    return f"10.{index // 65536}.{index // 256 % 256}.{index % 256}"
