"""The processes of a simulated cluster as a timeline: when servers answer, batches are full, steps end and commits exist.

A fluid stand-in for orchestrator, servers and trainer: servers that are up fill a batch at their share of the full rate, one batch
may lie ready while the trainer works on the one before, and a step is kept when no attempt goes back behind it.
"""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trivet.launcher.plan import ORCHESTRATOR, TRAINER
from trivet.wire.versions import Step

if TYPE_CHECKING:
    from support.simulated_nodes import SimulatedProcess


DRIVER = -1
"""The machine of the driver, which runs no role. The others are numbered: first those that train, then those that serve, then those
with environment workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """A cluster, what it loses when, and how long things take. Times are in seconds."""

    num_train_nodes: int
    min_train_nodes: int | None
    num_servers: int
    servers_per_machine: int
    num_env_nodes: int
    batch_s: float
    """Time in which all servers together fill a batch."""
    end_s: float
    losses: Sequence[tuple[float, int]] = ()
    """Times at which a machine is lost, and its number."""
    cuts: Sequence[tuple[float, int, float]] = ()
    """Times at which a machine is cut off, its number, and for how long."""
    actors_ended: Sequence[tuple[float, int]] = ()
    """Times at which the process of an actor ends, and the number of its node."""
    return_s: float = 90.0
    """From the loss of a machine until Ray has another one in its place: a scheduler has to notice the loss too."""
    requeue_s: float = 150.0
    """From the end of the job until it has a cluster and a driver again. SLURM alone waits for two minutes."""
    server_start_s: float = 180.0
    """vLLM: imports, 14 GB and more to load, graphs to capture."""
    env_start_s: float = 20.0
    trainer_start_s: float = 90.0
    """From the start of the ranks until the first batch could be trained on: imports from a shared file system, a checkpoint."""
    orchestrator_start_s: float = 30.0
    term_s: float = 5.0
    """From SIGTERM to the end of a process."""
    train_s: float = 60.0
    """Time of a step on all nodes that train."""
    commit_every: int = 2
    """Steps. Young's interval for a commit that costs 2 s and a training node lost every 50 minutes is 140 s."""
    commit_s: float = 10.0
    """From the end of a step until its checkpoint is committed, beside the next step."""


_POOLS = "env-workers"
"""Beginning of the names of pools of environment workers."""
_POOLS_WITHIN_S = 60.0
"""How long an orchestrator that starts waits for all pools (`environments.nodes.node_pools`)."""
_AT_WORK = ("start", "wait for a batch", "steps")
"""What the trainer does while nothing is lost."""


class Timeline:
    """Keeps what will happen, in order."""

    def __init__(self) -> None:
        self.now = 0.0
        self.happened_at = 0.0
        """When something happened last that the driver can notice."""
        self._planned: list[tuple[float, int, Callable[[], object], bool]] = []
        self._numbers = itertools.count()

    def at(self, moment: float, happens: Callable[[], object], *, is_noticed: bool = True) -> None:
        """Plan something.

        Args:
            is_noticed: the driver can notice it, and must not sleep on.
        """
        heapq.heappush(self._planned, (moment, next(self._numbers), happens, is_noticed))

    def after(self, seconds: float, happens: Callable[[], object], *, is_noticed: bool = True) -> None:
        self.at(self.now + seconds, happens, is_noticed=is_noticed)

    def next_noticed(self, *, before: float) -> float:
        """Return when the next thing happens that the driver can notice; `before` when that is later."""
        return min((moment for moment, _, _, is_noticed in self._planned if is_noticed and moment < before), default=before)

    def advance(self, until: float) -> None:
        """Go on to `until`, and do on the way what was planned."""
        while self._planned and self._planned[0][0] <= until:
            moment, _, happens, is_noticed = heapq.heappop(self._planned)
            self.now = max(self.now, moment)
            self.happened_at = self.now if is_noticed else self.happened_at
            happens()
        self.now = max(self.now, until)


class Training:
    """The state of the run that the processes would have, and where the time went.

    >>> training.begin(None, attempt=1)
    >>> training.started(process)
    """

    def __init__(self, plan: ClusterPlan, timeline: Timeline) -> None:
        self._plan = plan
        self._timeline = timeline
        self.attempt = 1
        self.step = 0
        self.committed: Step | None = None
        self.spent_s: defaultdict[str, float] = defaultdict(float)
        """Seconds by what the trainer did, or waited for."""
        self.downs: list[tuple[str, float, float]] = []
        """Name of each server or pool of environment workers that went, when, and when it was ready again."""
        self._kept: dict[int, float] = {}
        self._activity, self._since = "start", 0.0
        self._servers: dict[str, SimulatedProcess] = {}
        """Servers and pools of environment workers."""
        self._serving: set[str] = set()
        self._down_since: dict[str, float] = {}
        self._roles: set[SimulatedProcess] = set()
        self._token = 0
        self._is_ready = self._is_stepping = False
        self._filling_since: float | None = None
        self._filled = 0.0
        """Batches that are ready, at most one."""

    @property
    def kept_s(self) -> float:
        """Seconds of steps that no attempt has taken back."""
        return sum(self._kept.values())

    def enter(self, activity: str) -> None:
        """Note what the trainer does from now on."""
        self.spent_s[self._activity] += self._timeline.now - self._since
        self._activity, self._since = activity, self._timeline.now

    def begin(self, from_step: Step | None, *, attempt: int) -> None:
        """Go back to a commit."""
        self.attempt, self.step = attempt, from_step or 0
        for step in [step for step in self._kept if step > self.step]:
            self._take_back(self._kept.pop(step))

    def _take_back(self, seconds: float) -> None:
        self.spent_s["steps"] -= seconds
        self.spent_s["steps taken back"] += seconds

    def finish(self) -> None:
        """Close the account."""
        self.enter("over")

    def started(self, process: "SimulatedProcess") -> None:
        spec, plan = process.spec, self._plan
        if not spec.does_finish:
            before = self._servers.get(spec.name)
            assert before is None or before.exit_code is not None, f"two copies of {spec.name} run"
            self._servers[spec.name] = process
            start_s = plan.env_start_s if spec.name.startswith(_POOLS) else plan.server_start_s
            self._timeline.after(start_s, lambda: self._serve(process))
            return
        if not self._roles:
            self._token += 1
            self.enter("start")
        assert all(other.attempt == process.attempt for other in self._roles), "ranks of two attempts run"
        self._roles.add(process)
        token = self._token
        if spec.name == ORCHESTRATOR:
            self._timeline.after(
                plan.orchestrator_start_s,
                lambda: self._begin_filling(token, until=self._timeline.now + _POOLS_WITHIN_S),
                is_noticed=False,
            )
        if spec.name == TRAINER:
            self._timeline.after(plan.trainer_start_s, lambda: token == self._token and self._get_ready(), is_noticed=False)

    def stopping(self, process: "SimulatedProcess | None") -> None:
        """A process is told to end; None: the whole job is over."""
        if process is None or process.spec.does_finish:
            self._halt("stop, and wait for a node")

    def ended(self, process: "SimulatedProcess") -> None:
        name = process.spec.name
        if process in self._roles:
            self._roles.discard(process)
            self._halt("notice a loss" if self._activity in _AT_WORK else self._activity)
        elif self._servers.get(name) is process:
            self._down_since.setdefault(name, self._timeline.now)
            self._note_filled()
            self._serving.discard(name)
            self._step_when_full()

    def _halt(self, activity: str) -> None:
        """The trainer cannot go on: peers of a rank that is gone wait for it."""
        if self._is_stepping:
            seconds = self._timeline.now - self._since
            self.enter(activity)
            self._take_back(seconds)
        elif self._activity != activity:
            self.enter(activity)
        self._token += 1
        self._is_stepping = self._is_ready = False
        self._filling_since, self._filled = None, 0.0

    def is_serving(self, name: str) -> bool:
        return name in self._serving

    def _serve(self, process: "SimulatedProcess") -> None:
        name = process.spec.name
        if process.exit_code is not None or self._servers[name] is not process:
            return
        if name in self._down_since:
            self.downs.append((name, self._down_since.pop(name), self._timeline.now))
        self._note_filled()
        self._serving.add(name)
        self._step_when_full()

    def _begin_filling(self, token: int, *, until: float) -> None:
        """Begin once every pool of environment workers is there; `until` then with those that are."""
        if token != self._token:
            return
        if self._num_pools() < self._plan.num_env_nodes and self._timeline.now < until:
            self._timeline.after(1.0, lambda: self._begin_filling(token, until=until), is_noticed=False)
            return
        self._filling_since = self._timeline.now
        self._step_when_full()

    def _get_ready(self) -> None:
        self._is_ready = True
        self.enter("wait for a batch")
        self._step_when_full()

    def _num_pools(self) -> int:
        return sum(name.startswith(_POOLS) for name in self._serving)

    def _rate(self) -> float:
        """Return the batches a second: servers and environment workers together are as fast as those with the smaller share."""
        num_pools, plan = self._num_pools(), self._plan
        share = (len(self._serving) - num_pools) / plan.num_servers
        return min(share, num_pools / plan.num_env_nodes if plan.num_env_nodes else 1.0) / plan.batch_s

    def _note_filled(self) -> None:
        if self._filling_since is not None:
            self._filled = min(1.0, self._filled + (self._timeline.now - self._filling_since) * self._rate())
            self._filling_since = self._timeline.now

    def _step_when_full(self) -> None:
        if not self._is_ready or self._is_stepping or self._filling_since is None:
            return
        self._note_filled()
        token = self._token
        if self._filled < 1.0 - 1e-9:
            if rate := self._rate():
                wait_s = (1.0 - self._filled) / rate
                self._timeline.after(wait_s, lambda: token == self._token and self._step_when_full(), is_noticed=False)
            return
        self._filled, self._is_stepping = 0.0, True
        self.enter("steps")
        num_nodes = sum(process.spec.name != ORCHESTRATOR for process in self._roles)
        seconds = self._plan.train_s * self._plan.num_train_nodes / num_nodes
        self._timeline.after(seconds, lambda: token == self._token and self._end_step(seconds), is_noticed=False)

    def _end_step(self, seconds: float) -> None:
        self._is_stepping = False
        self.step += 1
        self._kept[self.step] = seconds
        self.enter("wait for a batch")
        if self.step % self._plan.commit_every == 0:
            token, step = self._token, Step(self.step)
            self._timeline.after(self._plan.commit_s, lambda: token == self._token and self._commit(step), is_noticed=False)
        self._step_when_full()

    def _commit(self, step: Step) -> None:
        self.committed = step
