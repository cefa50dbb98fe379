"""A run over many nodes in virtual time: supervision and agents are the real ones, machines and processes are not.

Real: `Supervisor`, `Recovery`, `Attempts`, the plan over nodes, `NodeHost`, `NodeRegistry`, and on each other node `NodeAgent` and
`HeadContact`. Stand-ins: sockets (a message arrives at once), the processes (`simulated_training`), and the scheduler that has
a lost node come back or queues the job again. Time passes in the supervisor's sleeps alone, and jumps to what happens next when no
unit of the run stops or waits for its restart.
"""

import io
import itertools
import time
from dataclasses import dataclass, field, replace
from typing import Any

from support.simulated_nodes import FIRST_PORT, NUM_CPUS, DirectReader, SameScratch, SimulatedHost, SimulatedNode, address_of
from support.simulated_training import ClusterPlan, Timeline, Training
from trivet.config.layout import RunLayout
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.shared import RunIdentity
from trivet.launcher.logs import RunLog
from trivet.launcher.node_plan import Node
from trivet.launcher.nodes import agent as agent_module
from trivet.launcher.nodes.host import NodeHost
from trivet.launcher.nodes.lead import Lead
from trivet.launcher.nodes.registry import NodeRegistry
from trivet.launcher.placement import HEAD, Placement, place
from trivet.launcher.plan import TRAINING, RecoveryUnit, RunPlan
from trivet.launcher.processes import Clock
from trivet.launcher.run_directory import RunDirectory
from trivet.launcher.supervision import observer
from trivet.launcher.supervision.attempts import Attempts
from trivet.launcher.supervision.recovery import Recovery
from trivet.launcher.supervision.supervisor import Supervisor
from trivet.machine import Machine
from trivet.wire.status import RoleState
from trivet.wire.versions import Step

_BEAT_INTERVAL_S = 25.0
"""Agents say something at least this often, and whenever the head looks: nobody reads what they say in between."""
_LEAP_S = 300.0
"""The longest sleep while nothing is wrong. The watchdog takes it for a launcher that was stopped, and waits longer."""
_WAITING_LEAP_S = 10.0
"""The longest sleep while a unit waits for its node."""
_BUSY_LEAP_S = 1.0
"""The longest sleep while a unit stops, or when something happened within `_BUSY_S`: orders and answers take two messages."""
_BUSY_S = 3.5
_PROBE_TIMEOUT_S = 1.0
"""A server on a lost node does not refuse a connection: who asks it waits for as long as `observer` allows."""


class HeadLostError(BaseException):
    """The head's own node is lost: its launcher ends wherever it is."""


class TimeIsUpError(BaseException):
    """The simulated time is over."""


@dataclass(kw_only=True)
class SimulatedAttempts(Attempts):
    """The attempts of a run whose checkpoints are numbers. Nothing but run.json is written."""

    training: Training
    restarts_all: bool

    @property
    def last_commit(self) -> Step | None:
        return self.training.committed

    def _newest_whole(self, log: RunLog) -> Step | None:
        return self.training.committed

    def _plan(self) -> RunPlan:
        planned = replace(Attempts._plan(self), configs={})  # nobody reads them
        if not self.restarts_all:
            return planned
        return replace(planned, processes=tuple(replace(spec, unit=TRAINING) for spec in planned.processes), server_urls={})

    def begin_next(self, log: RunLog) -> None:
        Attempts.begin_next(self, log)
        self.training.begin(self.from_step, attempt=self.run.attempt)

    def record(self, event: object) -> None: ...

    def has_completed(self, role: str) -> bool:
        return False

    def name_servers(self, *, without: object = ()) -> None: ...


@dataclass(kw_only=True)
class Ends:
    """How often the launcher ended before the time was up, and why."""

    head_lost: int = 0
    codes: dict[int, int] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)


class SimulatedCluster:
    """One run under one plan of losses.

    >>> cluster = SimulatedCluster(plan, layout=RunLayout(tmp_path))
    >>> cluster.run()
    >>> cluster.training.kept_s / cluster.timeline.now
    0.95
    """

    def __init__(self, plan: ClusterPlan, *, layout: RunLayout) -> None:
        self.plan = plan
        self.timeline = Timeline()
        self.training = Training(plan, self.timeline)
        self.pids = itertools.count(1000)
        self.log_text = io.StringIO()
        self.log = RunLog(io.StringIO(), self.log_text, now=lambda: f"{self.timeline.now:.0f}")
        self.gpus = tuple(map(str, range(plan.gpus_per_node)))
        self.config = _config(plan, layout)
        self.placement: Placement = place(self.config)
        self.nodes = [SimulatedNode(self, index) for index in range(self.placement.num_nodes) if index != HEAD]
        slots = {server.name: server for server in self.placement.servers}
        self._servers_at = {
            f"http://{address_of(server.node)}:{FIRST_PORT + self.placement.listeners_on(server.node).index(name)}/v1": (
                name,
                server.node,
            )
            for name, server in slots.items()
        }
        self.local = SimulatedHost(cluster=self)
        self.ends = Ends()
        self.head_rounds_s: list[float] = []
        """CPU seconds of the head in each round of its supervisor."""
        self.plans_s: list[float] = []
        """CPU seconds of planning once: the launcher does it for each server that it restarts."""
        self._layout = layout
        self._attempt = 0
        self._is_head_there, self._is_ending = True, False
        self._recovery: Recovery | None = None
        self._units: tuple[RecoveryUnit, ...] = ()
        self._states: tuple[RoleState, ...] = ()
        self._changed_at = 0.0
        self._woken_at = 0.0
        for at, node in plan.losses:
            self.timeline.at(at, lambda node=node: self._lose(node))
        layout.root.mkdir(parents=True, exist_ok=True)

    def run(self) -> None:
        """Run until the plan's end, as often as the scheduler has to start the job."""
        before = observer.is_healthy, agent_module.ReportReader
        observer.is_healthy, agent_module.ReportReader = self._answers, DirectReader  # type: ignore[assignment, misc]
        try:
            while True:
                try:
                    code = self._lead()
                except HeadLostError:
                    self.ends.head_lost += 1
                    self._await_agents()
                else:
                    self.ends.codes[code] = self.ends.codes.get(code, 0) + 1
                    said = [
                        line for line in self.log_text.getvalue().splitlines() if line.endswith("; stopping what still runs")
                    ]
                    self.ends.reasons.append(said[-1])
                self._await_requeue()
        except TimeIsUpError:
            self.training.finish()
        finally:
            observer.is_healthy, agent_module.ReportReader = before  # type: ignore[misc]

    def _lead(self) -> int:
        plan, deployment = self.plan, self.config.deployment
        self._attempt += 1
        self._woken_at = time.process_time()
        wanted = {node.index: self.placement.listeners_on(node.index) for node in self.nodes}
        num_gpus = dict.fromkeys(wanted, plan.gpus_per_node)
        self.registry = NodeRegistry(num_gpus, config_digest="same", version="1", lost_after_s=deployment.lost_after_s)
        host: NodeHost = NodeHost(
            self.local,  # type: ignore[arg-type]  # acts as one
            self.registry,
            wanted=wanted,
            clock=lambda: self.timeline.now,
            sleep=self._sleep,
        )
        for node in self.nodes:
            node.join()
        while host.lost_nodes():
            self._sleep(0.2)
        lead = Lead(host=host, own=self._head_node(), python="python", known={})
        plans: dict[object, RunPlan] = {}

        def make_plan(config: RLConfig, run: RunIdentity, resume_step: Step | None) -> RunPlan:
            key = (run.attempt, resume_step, frozenset(host.lost_nodes()))
            if key not in plans:  # ports and addresses stay: what is the same need not be planned again for each server
                begun = time.process_time()
                plans[key] = lead.plan(config, run, resume_step)
                self.plans_s.append(time.process_time() - begun)
            return plans[key]

        self.training.begin(self.training.committed, attempt=self._attempt)
        attempts = SimulatedAttempts(
            config=self.config,
            directory=RunDirectory(self._layout),
            run=RunIdentity(id="simulated", attempt=self._attempt),
            from_step=self.training.committed,
            make_plan=make_plan,
            scratch=SameScratch(),  # type: ignore[arg-type]
            training=self.training,
            restarts_all=plan.restarts_all,
        )
        self._units = tuple(dict.fromkeys(spec.unit for spec in attempts.planned.processes))
        supervisor = Supervisor(
            attempts,
            host=host,
            log=self.log,
            clock=Clock(now=lambda: self.timeline.now, unix_time=lambda: self.timeline.now, sleep=self._sleep),
        )
        self._recovery = supervisor._recovery
        try:
            code = supervisor.run()
        finally:
            self._attempt, self._recovery = attempts.run.attempt, None
        host.end_run(code)
        return code

    def _head_node(self) -> Node:
        ports = {name: 5000 + offset for offset, name in enumerate(self.placement.listeners_on(HEAD))}
        machine = Machine(gpus=self.gpus, num_cpus=NUM_CPUS)
        return Node(index=HEAD, name="head", host=address_of(HEAD), interface="eth0", machine=machine, ports=ports)

    def _sleep(self, seconds: float) -> None:
        """Let time pass: to what happens next, at most as long as the head would not notice the difference."""
        if self._is_ending:
            return  # the launcher is gone: what its clean-up waits for does not matter
        self._check()
        self.head_rounds_s.append(time.process_time() - self._woken_at)
        now = self.timeline.now
        until = self.timeline.next_noticed(before=min(now + max(seconds, self._leap_s()), self.plan.end_s))
        while self.timeline.now < until:
            self.timeline.advance(min(until, self.timeline.now + _BEAT_INTERVAL_S))
            for node in self.nodes:
                node.beat()
        self._woken_at = time.process_time()
        self._check()

    def _check(self) -> None:
        self._is_ending = not self._is_head_there or self.timeline.now >= self.plan.end_s
        if not self._is_head_there:
            raise HeadLostError
        if self._is_ending:
            raise TimeIsUpError

    def _leap_s(self) -> float:
        if self._recovery is None:
            return 0.0
        states = tuple(self._recovery.state_of(unit) for unit in self._units)
        if states != self._states:
            self._states, self._changed_at = states, self.timeline.now
        if RoleState.STOPPING in states or self.timeline.now - max(self.timeline.happened_at, self._changed_at) < _BUSY_S:
            return _BUSY_LEAP_S
        return _WAITING_LEAP_S if RoleState.BACKING_OFF in states else _LEAP_S

    def _lose(self, index: int) -> None:
        self.timeline.after(self.config.deployment.lost_after_s + 0.01, lambda: None)  # the head looks at that moment
        if index == HEAD:
            self._is_head_there = False
            self.local.end_all()
            return
        node = self.nodes[index - 1]
        if node.is_there:
            node.lose()
            self.timeline.after(self.plan.return_s, lambda: node.is_there or node.join())

    def _await_agents(self) -> None:
        """The agents miss the head, and end before the job starts again."""
        while not all(not node.is_there or node.miss_head() for node in self.nodes):
            self.timeline.advance(self.timeline.now + 0.5)
        assert not any(node.host.running for node in self.nodes)

    def _await_requeue(self) -> None:
        self.training.stopping(None)
        self.timeline.advance(self.timeline.now + self.plan.requeue_s)
        self._is_head_there, self._is_ending = True, False
        if self.timeline.now >= self.plan.end_s:
            raise TimeIsUpError

    def _answers(self, base_url: str) -> bool:
        name, node = self._servers_at[base_url]
        if not self.nodes[node - 1].is_there:
            self.timeline.advance(self.timeline.now + _PROBE_TIMEOUT_S)
        return self.training.is_serving(name)


def _config(plan: ClusterPlan, layout: RunLayout) -> RLConfig:
    deployment: dict[str, Any] = {
        "type": "multi_node",
        "num_train_nodes": plan.num_train_nodes,
        "num_infer_replicas": plan.num_servers,
        "servers_per_node": plan.servers_per_node,
        "gpus_per_node": plan.gpus_per_node,
        "min_train_nodes": None if plan.restarts_all else plan.min_train_nodes,
    }
    return RLConfig.model_validate({"output_dir": str(layout.root), "deployment": deployment})
