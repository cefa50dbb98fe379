"""A run over many machines in virtual time: supervision and nodes are the real ones, machines, Ray and processes are not.

Real: `Supervisor`, `Recovery`, `Attempts`, the plan over nodes, `Driver`, `ClusterHost`, `NodeTable`, and on each node
`NodeProcesses` and `is_missed`. Stand-ins: Ray (`simulated_nodes`), the processes (`simulated_training`), and the scheduler that
has a lost machine replaced or queues the job again. Time passes in the supervisor's sleeps alone, and jumps to what happens next
when no unit of the run stops or waits for its restart.
"""

import io
import itertools
from dataclasses import dataclass, replace
from typing import Any

from support.simulated_nodes import EXCHANGE_INTERVAL_S, PORT, DirectReader, SimulatedRay, address_of
from support.simulated_training import DRIVER, ClusterPlan, Timeline, Training
from trivet.cluster import node_processes
from trivet.cluster.driver import Driver
from trivet.cluster.host import ClusterHost
from trivet.cluster.table import NodeTable
from trivet.config.layout import RunLayout
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.shared import RunIdentity
from trivet.launcher.logs import RunLog
from trivet.launcher.placement import place
from trivet.launcher.plan import RecoveryUnit, RunPlan
from trivet.launcher.processes import Clock
from trivet.launcher.run_directory import RunDirectory
from trivet.launcher.supervision import observer
from trivet.launcher.supervision.attempts import Attempts
from trivet.launcher.supervision.recovery import Recovery
from trivet.launcher.supervision.supervisor import Supervisor
from trivet.wire.status import RoleState
from trivet.wire.versions import Step

_LEAP_S = 300.0
"""The longest sleep while nothing is wrong. The watchdog takes it for a launcher that was stopped, and waits longer."""
_WAITING_LEAP_S = 10.0
"""The longest sleep while a unit waits for its node."""
_BUSY_LEAP_S = 1.0
"""The longest sleep while a unit stops, or when something happened within `_BUSY_S`: an order is answered a moment later."""
_BUSY_S = 3.5
_PROBE_TIMEOUT_S = 1.0
"""A server on a lost node does not refuse a connection: who asks it waits for as long as `observer` allows."""


class DriverGoneError(BaseException):
    """The driver's machine is lost, or the simulated time is over: the driver's code ends wherever it is."""


@dataclass(kw_only=True)
class SimulatedAttempts(Attempts):
    """The attempts of a run whose checkpoints are numbers. Nothing but run.json is written."""

    training: Training

    @property
    def last_commit(self) -> Step | None:
        return self.training.committed

    def _newest_whole(self, log: RunLog) -> Step | None:
        return self.training.committed

    def _plan(self) -> RunPlan:
        return replace(Attempts._plan(self), configs={})  # nobody reads them

    def begin_next(self, log: RunLog) -> None:
        Attempts.begin_next(self, log)
        self.training.begin(self.from_step, attempt=self.run.attempt)

    def record(self, event: object) -> None: ...

    def has_completed(self, role: str) -> bool:
        return False

    def name_servers(self, *, without: object = ()) -> None: ...


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
        self.config = _config(plan, layout)
        self.gone: set[int] = set()
        """Machines that are lost, and not replaced yet."""
        self.cut_off: set[int] = set()
        """Machines that run, and that the driver does not reach."""
        self.ends: list[str] = []
        """Why the driver ended before the time was up, each time."""
        self._placement = place(self.config)
        self._servers = {f"http://{address_of(server.node)}:{PORT}/v1": server for server in self._placement.servers}
        num_train, num_env = plan.num_train_nodes, plan.num_env_nodes
        first = num_train + -(-plan.num_servers // plan.servers_per_machine)
        serving = (num_train + number // plan.servers_per_machine for number in range(plan.num_servers))
        self._machines = dict(enumerate((*range(num_train), *serving, *range(first, first + num_env))))
        """The machine of each node. Servers share machines."""
        self._log = RunLog(io.StringIO(), self.log_text, now=lambda: f"{self.timeline.now:.0f}")
        self._layout = layout
        self._attempt = 0
        self._is_driver_there = True
        self._recovery: Recovery | None = None
        self._units: tuple[RecoveryUnit, ...] = ()
        for at, machine in plan.losses:
            self.timeline.at(at, lambda machine=machine: self._lose(machine))
        for at, machine, seconds in plan.cuts:
            self.timeline.at(at, lambda machine=machine, seconds=seconds: self._cut(machine, seconds))
        for at, node in plan.actors_ended:
            self.timeline.at(at, lambda node=node: self.ray.end_actor(node))
        layout.root.mkdir(parents=True, exist_ok=True)

    def run(self) -> None:
        """Run until the plan's end, as often as the scheduler has to start the job."""
        before = observer.is_healthy, node_processes.ReportReader
        observer.is_healthy, node_processes.ReportReader = self._answers, DirectReader  # type: ignore[assignment, misc]
        try:
            while True:
                try:
                    self.ends.append(f"exit code {self._lead()}")
                except DriverGoneError:
                    if self.timeline.now >= self.plan.end_s:
                        break
                    self.ends.append("driver lost")
                self._await_requeue()
            self.training.finish()
        finally:
            observer.is_healthy, node_processes.ReportReader = before  # type: ignore[misc]

    def _lead(self) -> int:
        placement = self._placement
        self._attempt += 1
        clock = Clock(now=lambda: self.timeline.now, unix_time=lambda: self.timeline.now, sleep=self._sleep)
        table = NodeTable(
            {node: placement.possible_listeners_on(node) for node in range(placement.num_nodes)},
            lost_after_s=self.config.deployment.lost_after_s,
        )
        host = ClusterHost(table, clock=clock)
        self.ray = SimulatedRay(self, table, self._machines)
        self.ray.place_all()
        while host.lost_nodes():
            self._sleep(0.2)
        host.joined_nodes()
        self.training.begin(self.training.committed, attempt=self._attempt)
        attempts = SimulatedAttempts(
            config=self.config,
            directory=RunDirectory(self._layout),
            run=RunIdentity(id="simulated", attempt=self._attempt),
            from_step=self.training.committed,
            make_plan=Driver(host=host, python="python").plan,
            scratch=None,
            training=self.training,
        )
        self._units = tuple(dict.fromkeys(spec.unit for spec in attempts.planned.processes))
        supervisor = Supervisor(attempts, host=host, log=self._log, clock=clock)
        self._recovery = supervisor._recovery
        try:
            return supervisor.run()
        finally:
            self._attempt, self._recovery = attempts.run.attempt, None

    def _sleep(self, seconds: float) -> None:
        """Let time pass: to what happens next, at most as long as the driver would not notice the difference."""
        self._check()
        self.ray.exchange()
        now = self.timeline.now
        until = self.timeline.next_noticed(before=min(now + max(seconds, self._leap_s()), self.plan.end_s))
        while self.timeline.now < until:
            self.timeline.advance(min(until, self.timeline.now + EXCHANGE_INTERVAL_S))
            self.ray.exchange()
        self._check()

    def _check(self) -> None:
        if not self._is_driver_there or self.timeline.now >= self.plan.end_s:
            raise DriverGoneError

    def _leap_s(self) -> float:
        if self._recovery is None:
            return 0.0
        states = {self._recovery.state_of(unit) for unit in self._units}
        if RoleState.STOPPING in states or self.timeline.now - self.timeline.happened_at < _BUSY_S:
            return _BUSY_LEAP_S
        return _WAITING_LEAP_S if RoleState.BACKING_OFF in states else _LEAP_S

    def _lose(self, machine: int) -> None:
        """Lose a machine; another one takes its place after a while."""
        if machine == DRIVER:
            self._exchange_now()
            self._is_driver_there = False
        elif machine not in self.gone:
            self._await_notice()
            self.gone.add(machine)
            self.ray.lose(machine)
            self.timeline.after(self.plan.return_s, lambda: self._replace(machine))

    def _replace(self, machine: int) -> None:
        self.gone.discard(machine)
        self.ray.place_all()

    def _cut(self, machine: int, seconds: float) -> None:
        """Cut a machine off from the driver for some seconds."""
        self._exchange_now()
        self._await_notice()
        self.cut_off.add(machine)
        self.timeline.after(self.config.deployment.lost_after_s / 2 + 0.01, lambda: None)  # the node looks at that moment
        self.timeline.after(seconds, lambda: self.cut_off.discard(machine))

    def _await_notice(self) -> None:
        self.timeline.after(self.config.deployment.lost_after_s + 0.01, lambda: None)  # the driver looks at that moment

    def _exchange_now(self) -> None:
        """Have every node know that the driver has just heard it: the driver tells it in the next message."""
        for _ in range(2):
            self.ray.exchange(must=True)

    def _await_requeue(self) -> None:
        """Let the nodes end what the driver left behind, and the job start again."""
        self.training.stopping(None)
        self.timeline.advance(self.timeline.now + self.config.deployment.lost_after_s / 2 + 0.01)
        for actor in self.ray.actors.values():
            actor.check_fence()
        assert not any(process.exit_code is None for actor in self.ray.actors.values() for process in actor.host.running)
        self.timeline.advance(self.timeline.now + self.plan.requeue_s)
        self._is_driver_there = True

    def _answers(self, base_url: str) -> bool:
        server = self._servers[base_url]
        if self._machines[server.node] in self.gone:
            self.timeline.advance(self.timeline.now + _PROBE_TIMEOUT_S)
        return self.training.is_serving(server.name)


def _config(plan: ClusterPlan, layout: RunLayout) -> RLConfig:
    deployment: dict[str, Any] = {
        "type": "multi_node",
        "num_train_nodes": plan.num_train_nodes,
        "num_infer_replicas": plan.num_servers,
        "num_env_nodes": plan.num_env_nodes,
        "min_train_nodes": plan.min_train_nodes,
    }
    return RLConfig.model_validate({"output_dir": str(layout.root), "deployment": deployment})
