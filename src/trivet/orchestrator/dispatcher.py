"""Keeps groups in flight: decides when a group may start and on which server, runs it, and hands its result to the buffer.

    ExampleSampler --draw--> Dispatcher --run_group--> environments and servers
    ServerPool ----server--->  |    ^                        |
                               |    +------- rollouts -------+
                               v
                          GroupBuffer --batch n--> Loop

| waits for | unblocked by |
|---|---|
| `run`: `changed`, for at most `_IDLE_WAIT_S` | a group that ended; a new step, policy or server; the loss of a server |
| `run`: the end of a pause before a retry, or for `tasks_per_minute` | the clock |
| the task of each group: its rollouts | the environment; `server_down` and staleness cancel the task |

Each group runs in a task of its own, so its failure costs that group only. When a server or a worker is lost, each group that ran
there is retried under the same id.

A deterministic run starts its groups in rounds. A round consists of the groups that the batch being filled still lacks. The next
round starts when every group of this one has ended. The groups of a round go to the buffer in the order of their ids. So nothing is
in flight when a policy is loaded or a checkpoint is formed: the groups, the policy and the state of the sampler are the same in
every run, resumed or not.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from trivet.algorithms.advantages import AdvantageFunction, AdvantageInputs
from trivet.algorithms.arithmetic import round_down
from trivet.algorithms.credit import set_advantages
from trivet.algorithms.dispatching import TokenBucket, may_dispatch, required_version
from trivet.algorithms.packing import truncate
from trivet.backoff import backoff_s
from trivet.client.server_pool import ServerPool
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.environments.port import EnvironmentPool
from trivet.environments.settings import sampling_arguments
from trivet.errors import RolloutFailed, WorkerLost
from trivet.faults import reach
from trivet.orchestrator.buffer import GroupBuffer
from trivet.orchestrator.sampler import Draw, ExampleSampler
from trivet.orchestrator.teacher import Teacher
from trivet.wire.groups import GroupRequest
from trivet.wire.rollouts import Group, Rollout
from trivet.wire.versions import START_VERSION, GroupId, PolicyVersion, Step

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 5.0
"""The dispatcher checks again at least this often, so that a missed notification costs seconds and not the run."""
_MAX_STARTS_WITHOUT_YIELD = 64
"""Groups started before the event loop runs other tasks. Otherwise sockets would wait for thousands of starts."""
_BURST_S = 5.0
"""As many rollouts may start at once as `tasks_per_minute` allows in this many seconds, but at least one group."""
_MAX_GROUP_ATTEMPTS = 5
"""Attempts at a group. The pauses between them add up to 7 s, more than the 5 s between two health checks of a server."""
_RETRY_PAUSE_S = 1.0
"""Pause before the third attempt at a group. It doubles with each further one. The second attempt follows at once, most likely on
another server."""


RunDrawnGroup = Callable[[Draw, str], Awaitable[list[Rollout]]]
"""Runs the group of a draw on the server at the given base URL and returns the scored rollouts."""


def group_runner(pool: EnvironmentPool, config: OrchestratorConfig, teacher: Teacher | None = None) -> RunDrawnGroup:
    """Return a function that runs a group in the environments of `pool`. If there is a teacher, it scores the rollouts then.

    All requests of a group go to one server, so that the prompt is computed once. The draw alone determines the sampling
    parameters, so a group that is dispatched again has the same ones.
    """
    sampling_by_env = {env.label: env.sampling.over(config.sampling) for env in config.env}

    async def run(draw: Draw, base_url: str) -> list[Rollout]:
        sampling = sampling_by_env[draw.env]
        temperature = sampling.temperature_at(draw.step, max_steps=config.max_steps)
        rollouts = await pool.run_group(
            GroupRequest(
                group_id=draw.group_id,
                env=draw.env,
                example_id=draw.example_id,
                num_rollouts=config.rollouts_per_example,
                base_url=base_url,
                sampling=sampling_arguments(sampling, temperature=temperature),
            )
        )
        if teacher is not None:
            await teacher.score_rollouts(rollouts, seq_len=config.seq_len)
        return rollouts

    return run


def make_group(draw: Draw, rollouts: list[Rollout], *, config: OrchestratorConfig, advantage: AdvantageFunction) -> Group:
    """Return the group of `draw` with its advantages set.

    Samples are cut to `seq_len`. With `zero_truncated_completions` the reward of a truncated rollout becomes 0 first, and
    its scores and turn rewards count as 0.
    """
    group = Group(group_id=draw.group_id, env=draw.env, example_id=draw.example_id, rollouts=rollouts)
    for rollout in rollouts:
        rollout.samples = [truncate(sample, seq_len=config.seq_len) for sample in rollout.samples]
        if config.zero_truncated_completions and rollout.is_truncated:
            rollout.reward = 0.0
    has_all = config.advantage.needs_scores_and_turns
    inputs = AdvantageInputs.from_group(group, zeroes_truncated=config.zero_truncated_completions, has_all=has_all)
    for rollout, value in zip(rollouts, advantage(inputs), strict=True):
        set_advantages(rollout, value)
    return group


class ChangeEvent:
    """An event for one waiting task. A wait that it ends clears it. A notification that comes before the wait ends that wait."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """End the current wait, or the next one when no task waits."""
        self._event.set()

    async def wait(self, timeout_s: float) -> bool:
        """Return True when notified, False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        return True


@dataclass(slots=True, kw_only=True, eq=False)
class _GroupAttempt:
    """One attempt at a group, before or while it runs."""

    draw: Draw
    number: int = 1
    """Counts the attempts at this group, from 1."""
    not_before: float = float("-inf")
    """Earliest start, by the dispatcher's clock."""
    server: str = ""
    """Base URL of the server on which it runs; empty before the start."""
    version: PolicyVersion = START_VERSION
    """The dispatcher's `version` at the start. The server may serve a newer policy."""
    task: asyncio.Task[None] | None = None
    """None before the start."""


class Dispatcher:
    """Starts groups, and reports to the buffer how each one ended."""

    def __init__(
        self,
        config: OrchestratorConfig,
        *,
        sampler: ExampleSampler,
        buffer: GroupBuffer,
        run_group: RunDrawnGroup,
        servers: ServerPool,
        advantage: AdvantageFunction,
        on_group_end: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a dispatcher with nothing in flight, and subscribe it to the servers.

        Args:
            on_group_end: called when a group has ended, and when a server was lost.
        """
        self._config = config
        self._sampler = sampler
        self._buffer = buffer
        self._run_group = run_group
        self._servers = servers
        self._advantage = advantage
        self._on_group_end = on_group_end
        self._clock = clock
        self._group_size = config.rollouts_per_example
        self._rollouts_per_step = round_down(config.batch_size * config.oversampling_factor)
        self._undispatched = deque[Draw]()
        """Draws that start before any new one: those of a checkpoint, and those of the round in a deterministic run."""
        self._retries = deque[_GroupAttempt]()
        """The next attempts at groups whose last attempt was lost, in the order of the losses. These groups are in flight."""
        self._running: dict[GroupId, _GroupAttempt] = {}
        """The attempts that run now."""
        self._held_outcomes: dict[GroupId, Callable[[], None]] = {}
        """Groups of a deterministic run that ended before others of their round. The function reports the end to the buffer."""
        self._outcome_lock = asyncio.Lock()
        self._stale_checked_for = Step(0)
        """The step for which stale groups were cancelled last."""
        self._bucket: TokenBucket | None = None
        """The limit of `tasks_per_minute`; None without one."""
        if config.tasks_per_minute is not None:
            burst = max(self._group_size, config.tasks_per_minute / 60 * _BURST_S)
            self._bucket = TokenBucket(per_minute=config.tasks_per_minute, burst=burst, now=clock())
        self.changed = ChangeEvent()
        self.step = Step(1)
        """The batch being filled."""
        self.version = START_VERSION
        """The policy that was loaded last. Every server serves it or a newer one."""
        self.max_in_flight = min(self._rollouts_per_step, config.max_concurrent or self._rollouts_per_step)
        """Limit of rollouts in flight. `LoadWatcher` adapts it to the servers' load."""
        self.highest_in_flight = config.max_concurrent or self._rollouts_per_step * (config.max_async_level + 1)
        """Highest value of the limit. Without `max_concurrent` all rollouts are in flight that `may_dispatch` lets start."""
        servers.subscribe(on_down=self.server_down, on_up=self.changed.notify)

    @property
    def undispatched_draws(self) -> list[Draw]:
        """Return the groups of the checkpoint that were not started again yet. The next checkpoint must keep them too."""
        return list(self._undispatched)

    @property
    def rollouts_in_flight(self) -> int:
        """Return the number of rollouts in all groups in flight, without groups that only wait for others of their round."""
        return (self._buffer.num_in_flight - len(self._held_outcomes)) * self._group_size

    async def run(self) -> None:
        """Start groups as they may start, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                if self.step != self._stale_checked_for:  # nothing but a new step makes a group in flight stale
                    self._stale_checked_for = self.step
                    for group_id in self._buffer.stale_in_flight(self.step):
                        # A group that waits for a retry is kept: the retry starts from a newer policy.
                        if (attempt := self._running.get(group_id)) is not None:
                            self._cancel(attempt)
                            self._buffer.cancelled(group_id, "stale")
                if self._config.deterministic:
                    self._draw_round()
                num_started = 0
                while (pause_s := self._seconds_until_start()) == 0 and self._start_next(tasks):
                    num_started += 1
                    if num_started % _MAX_STARTS_WITHOUT_YIELD == 0:
                        await asyncio.sleep(0)
                await self.changed.wait(min(pause_s or _IDLE_WAIT_S, _IDLE_WAIT_S))

    def resume(self, draws: Sequence[Draw]) -> None:
        """Start `draws` before all others, under their old ids: they were in flight when the checkpoint was made."""
        self._undispatched.extend(draws)

    def policy_served(self, version: PolicyVersion) -> None:
        """Start groups from `version`, which the servers serve now."""
        self.version = version
        self.changed.notify()

    def server_down(self, root: str) -> None:
        """Retry every group that runs on the server at `root`, which was marked unhealthy."""
        for attempt in [attempt for attempt in self._running.values() if attempt.server == root]:
            self._cancel(attempt)
            self._retry_or_fail(attempt, f"the server {root} was marked unhealthy")
        self.changed.notify()
        self._on_group_end()

    def _draw_round(self) -> None:
        """Draw the round of a deterministic run, if every group of the last round has ended and the required policy is served."""
        required = required_version(step=self.step, max_async_level=self._config.max_async_level)
        if not self._undispatched and not self._buffer.num_in_flight and self.version == required:
            num_groups = self._config.batch_size // self._group_size - self._buffer.num_ready
            draws = [self._sampler.take(self.step) for _ in range(num_groups)]
            self._undispatched.extend(draw for draw in draws if draw is not None)

    def _seconds_until_start(self) -> float:
        """Return the seconds until the next group may start; 0 when one may start now."""
        now, in_flight = self._clock(), self.rollouts_in_flight
        is_below_limit = in_flight + self._group_size <= max(self.max_in_flight, self._group_size)
        rollouts_ahead = in_flight + self._buffer.num_ready * self._group_size
        # The limit is not checked for a retry: its group still counts as in flight.
        if self._is_retry_due(now) or (is_below_limit and self._may_start(rollouts_ahead)):
            return self._bucket.wait_s(self._group_size, now=now) if self._bucket else 0.0
        return self._retries[0].not_before - now if self._retries else _IDLE_WAIT_S

    def _is_retry_due(self, now: float) -> bool:
        return bool(self._retries) and self._retries[0].not_before <= now

    def _may_start(self, rollouts_ahead: int) -> bool:
        """Return whether the served policy is recent enough for the batch that takes a group started now.

        A deterministic run starts every draw of its round.

        Args:
            rollouts_ahead: rollouts in flight or ready, which batches take before those of this group.
        """
        if self._config.deterministic:
            return bool(self._undispatched) or self._is_retry_due(self._clock())
        return may_dispatch(
            step=self.step,
            version=self.version,
            rollouts_ahead=rollouts_ahead,
            rollouts_per_step=self._rollouts_per_step,
            max_async_level=self._config.max_async_level,
        )

    def _start_next(self, tasks: asyncio.TaskGroup) -> bool:
        """Start a retry, else an undispatched draw, else a new draw. Return False when there is no group or no server for it."""
        is_retry = self._is_retry_due(self._clock())
        if is_retry and not self._may_start(0):
            return False
        server = self._servers.pick(num_rollouts=self._group_size)
        if server is None:
            return False
        if is_retry:
            attempt = self._retries.popleft()
        elif draw := self._undispatched.popleft() if self._undispatched else self._sampler.take(self.step):
            attempt = _GroupAttempt(draw=draw)
        else:
            self._servers.release(server, num_rollouts=self._group_size)
            return False
        if self._bucket:
            self._bucket.take(self._group_size)
        attempt.server, attempt.version = server, self.version
        reach("dispatch.before", step=self.step)
        self._buffer.dispatched(attempt.draw, version=self.version, server=server)
        reach("dispatch.after", step=self.step)
        group_id = attempt.draw.group_id
        self._running[group_id] = attempt
        attempt.task = tasks.create_task(self._run(attempt), name=f"group-{group_id}")
        return True

    async def _run(self, attempt: _GroupAttempt) -> None:
        """Run an attempt at a group to its end. Then finish the group, fail it, or retry it when server or worker were lost."""
        draw = attempt.draw
        lost = error = kind = ""
        is_infrastructure = False
        rollouts: list[Rollout] = []
        try:
            rollouts = await self._run_group(draw, attempt.server)
        except WorkerLost as exc:
            lost = str(exc)
        except Exception as exc:  # noqa: BLE001  an environment is the user's code: what it raises costs this group only
            error, kind = f"{type(exc).__name__}: {exc}", type(exc).__name__
            if isinstance(exc, RolloutFailed):
                kind, is_infrastructure = exc.kind, exc.is_infrastructure
            if await self._servers.is_at_fault(attempt.server):
                lost = f"the server {attempt.server} failed: {error}"
        # One group at a time: with the sleep at the end, the event loop serves timers and sockets between two groups.
        async with self._outcome_lock:
            if self._running.get(draw.group_id) is not attempt:
                return  # it was cancelled or retried while this task waited
            self._remove(attempt)
            runs = (run for rollout in rollouts for sample in rollout.samples for run in sample.versions)
            if not (lost or error) and any(run.version < attempt.version for run in runs):
                lost = f"the server {attempt.server} answered with an older policy than it served: it was started again"
            if lost:
                self._retry_or_fail(attempt, lost)
            elif error:
                logger.warning("group failed group=%s env=%s: %s", draw.group_id, draw.env, error)
                self._report_outcome(
                    draw, partial(self._buffer.failed, draw.group_id, error, kind=kind, is_infrastructure=is_infrastructure)
                )
            else:
                self._report_outcome(draw, partial(self._finish, draw, rollouts))
            self.changed.notify()
            self._on_group_end()
            await asyncio.sleep(0)

    def _report_outcome(self, draw: Draw, report: Callable[[], None]) -> None:
        """Call `report`, which reports the end of a group: at once, or in a deterministic run when the whole round has ended."""
        if not self._config.deterministic:
            report()
            return
        self._held_outcomes[draw.group_id] = report
        if not (self._undispatched or self._retries or self._running):
            outcomes, self._held_outcomes = self._held_outcomes, {}
            for group_id in sorted(outcomes):
                outcomes[group_id]()

    def _finish(self, draw: Draw, rollouts: list[Rollout]) -> None:
        """Give the finished group to the buffer, and its rewards to the sampler."""
        group = make_group(draw, rollouts, config=self._config, advantage=self._advantage)
        self._buffer.finished(group)
        self._sampler.finished(group, draw, step=self.step)

    def _cancel(self, attempt: _GroupAttempt) -> None:
        if attempt.task is not None:
            attempt.task.cancel()
        self._remove(attempt)

    def _remove(self, attempt: _GroupAttempt) -> None:
        """Remove an attempt from those that run, and free its place on the server."""
        del self._running[attempt.draw.group_id]
        self._servers.release(attempt.server, num_rollouts=self._group_size)

    def _retry_or_fail(self, attempt: _GroupAttempt, reason: str) -> None:
        """Plan the next attempt at the group of a lost one, after a pause that grows. After the last attempt the group fails."""
        draw, number = attempt.draw, attempt.number
        if number >= _MAX_GROUP_ATTEMPTS:
            error = f"WorkerLost: lost {number} times, the last time because {reason}"
            self._report_outcome(
                draw, partial(self._buffer.failed, draw.group_id, error, kind="WorkerLost", is_infrastructure=True)
            )
            return
        pause_s = backoff_s(number - 1, first_s=_RETRY_PAUSE_S) if number > 1 else 0.0
        self._retries.append(_GroupAttempt(draw=draw, number=number + 1, not_before=self._clock() + pause_s))
        logger.info("group is dispatched again group=%s tries=%s: %s", draw.group_id, number, reason)
