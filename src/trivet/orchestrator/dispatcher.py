"""Keeps groups in flight: decides when one may start, on which server, runs it, and hands the result to the buffer.

    ExampleSampler --draw--> Dispatcher --run_group--> environments and servers
    ServerPool ----server--->  |    ^                        |
                               |    +------- rollouts -------+
                               v
                          GroupBuffer --ended groups--> Loop

| waits for | unblocked by |
|---|---|
| `changed`, at most `_IDLE_WAIT_S`: a group may start | a group ended, a new step, policy or server; a server that goes |
| the end of a pause: a retry, or `tasks_per_minute` | the clock |
| a task per group: its rollouts | the environment; `server_down` and staleness cancel it |

Each group is a task of its own; its failure costs that group only. A try that was lost with its server or its worker is made
again, under the same id.

A deterministic run starts its groups in rounds. A round is what the batch being filled still lacks. The next one starts when every
group of the last has ended, and they are handed on in the order of their ids. So nothing is in flight when a policy is loaded or a
checkpoint is formed, and the groups, the policy and the state of the sampler are the same in every run, resumed or not.
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
"""The dispatcher looks again at least this often, so that a missed notification costs seconds and not the run."""
_STARTS_AT_ONCE = 64
"""Groups started before the event loop runs other tasks. With all at once, sockets would wait for thousands of starts."""
_BURST_S = 5.0
"""Seconds' worth of `tasks_per_minute` that may start at once: a limit of few per minute still fills whole groups."""
_MAX_TRIES = 5
"""Tries of a group. Their pauses add up to 7 s: more than the 5 s between two probes that notice the loss of a server."""
_RETRY_PAUSE_S = 1.0
"""Before the third try; doubles with each. The second follows at once, most likely on another server."""


RunDrawnGroup = Callable[[Draw, str], Awaitable[list[Rollout]]]
"""Runs the group of a draw on the server at a base URL and returns its scored rollouts."""


def group_runner(pool: EnvironmentPool, config: OrchestratorConfig, teacher: Teacher | None = None) -> RunDrawnGroup:
    """Return a function that runs groups in a pool of environments, and then has the teacher score them.

    All requests of a group go to one server, so that its prompt is computed once. Its sampling follows from the draw alone, so
    that a group dispatched again is sampled alike.
    """
    by_env = {env.label: env.sampling.over(config.sampling) for env in config.env}

    async def run(draw: Draw, base_url: str) -> list[Rollout]:
        sampling = by_env[draw.env]
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
    """Return the group of `draw`: its samples cut to `seq_len`, rewards of cut rollouts as configured, advantages set."""
    group = Group(group_id=draw.group_id, env=draw.env, example_id=draw.example_id, rollouts=rollouts)
    for rollout in rollouts:
        rollout.samples = [truncate(sample, seq_len=config.seq_len) for sample in rollout.samples]
        if config.zero_truncated_completions and rollout.is_truncated:
            rollout.reward = 0.0
    for rollout, value in zip(rollouts, advantage(AdvantageInputs.of(group)), strict=True):
        rollout.advantage = float(value)
    return group


class ChangeEvent:
    """An asyncio.Event that is cleared by the wait that it ends. A notification before the wait is kept, so none is lost."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """End the wait of the task that waits, or the next wait."""
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
class _Try:
    """One attempt at a group."""

    draw: Draw
    number: int = 1
    not_before: float = float("-inf")
    """Time of the dispatcher's clock."""
    server: str = ""
    version: PolicyVersion = START_VERSION
    """The policy that the server served when the try began, or a newer one."""
    task: asyncio.Task[None] | None = None


class Dispatcher:
    """Starts groups and accounts for how each ended."""

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
            on_group_end: called after every group that ended.
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
        self._retries = deque[_Try]()
        """Tries of groups that are in flight, whose last try was lost; in the order of the losses."""
        self._tries: dict[GroupId, _Try] = {}
        self._ended: dict[GroupId, Callable[[], None]] = {}
        """Groups of a deterministic run that ended before others of their round, with what hands each on."""
        self._accounting = asyncio.Lock()
        self._stale_checked_for = Step(0)
        self._bucket: TokenBucket | None = None
        if config.tasks_per_minute is not None:
            burst = max(self._group_size, config.tasks_per_minute / 60 * _BURST_S)
            self._bucket = TokenBucket(per_minute=config.tasks_per_minute, burst=burst, now=clock())
        self.changed = ChangeEvent()
        self.step = Step(1)
        """The batch being filled."""
        self.version = START_VERSION
        """The policy that the servers serve, or a newer one."""
        self.max_in_flight = min(self._rollouts_per_step, config.max_concurrent or self._rollouts_per_step)
        """Rollouts; adapted to the servers' load."""
        servers.subscribe(on_down=self.server_down, on_up=self.changed.notify)

    @property
    def undispatched_draws(self) -> list[Draw]:
        """Groups of the checkpoint that were not started again yet: part of the next checkpoint too."""
        return list(self._undispatched)

    @property
    def rollouts_in_flight(self) -> int:
        """Rollouts of all groups in flight."""
        return (self._buffer.num_in_flight - len(self._ended)) * self._group_size

    async def run(self) -> None:
        """Start groups as they may start, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                if self.step != self._stale_checked_for:  # a group in flight grows old with the step alone
                    self._stale_checked_for = self.step
                    for group_id in self._buffer.stale_in_flight(self.step):
                        # Without a try, the group waits for one, which starts from a newer policy.
                        if (attempt := self._tries.get(group_id)) is not None:
                            self._cancel(attempt)
                            self._buffer.cancelled(group_id, "stale")
                if self._config.deterministic:
                    self._draw_round()
                num_started = 0
                while (pause_s := self._pause_s()) == 0 and self._start_next(tasks):
                    num_started += 1
                    if num_started % _STARTS_AT_ONCE == 0:
                        await asyncio.sleep(0)
                await self.changed.wait(min(pause_s or _IDLE_WAIT_S, _IDLE_WAIT_S))

    def resume(self, draws: Sequence[Draw]) -> None:
        """Start `draws` first, under their old ids: they were in flight when the checkpoint was made."""
        self._undispatched.extend(draws)

    def policy_served(self, version: PolicyVersion) -> None:
        """Start groups from `version`, which the servers serve now."""
        self.version = version
        self.changed.notify()

    def server_down(self, root: str) -> None:
        """Retry every group on the server at `root`: its tries are lost."""
        for attempt in [attempt for attempt in self._tries.values() if attempt.server == root]:
            self._cancel(attempt)
            self._lost(attempt, f"the server {root} was marked unhealthy")
        self.changed.notify()
        self._on_group_end()

    def _draw_round(self) -> None:
        """Draw the groups that the batch still lacks, once every group drawn before has ended."""
        required = required_version(step=self.step, max_async_level=self._config.max_async_level)
        if not self._undispatched and not self._buffer.num_in_flight and self.version == required:
            num_groups = self._config.batch_size // self._group_size - self._buffer.num_ready
            draws = [self._sampler.take(self.step) for _ in range(num_groups)]
            self._undispatched.extend(draw for draw in draws if draw is not None)

    def _pause_s(self) -> float:
        """Return the seconds until the next group may start; 0 when one may now."""
        now, in_flight = self._clock(), self.rollouts_in_flight
        has_place = in_flight + self._group_size <= max(self.max_in_flight, self._group_size)
        ahead = in_flight + self._buffer.num_ready * self._group_size
        # A group whose last try was lost has its place in flight already.
        if self._is_retry_due(now) or (has_place and self._may_start(ahead)):
            return self._bucket.wait_s(self._group_size, now=now) if self._bucket else 0.0
        return self._retries[0].not_before - now if self._retries else _IDLE_WAIT_S

    def _is_retry_due(self, now: float) -> bool:
        return bool(self._retries) and self._retries[0].not_before <= now

    def _may_start(self, rollouts_ahead: int) -> bool:
        """Return whether a rollout that starts now would be young enough for its batch.

        Args:
            rollouts_ahead: rollouts in flight or ready, which go into batches before it.
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
        """Start a lost group, else one of the checkpoint, else a new one; False when there is no group or no server for it."""
        is_retry = self._is_retry_due(self._clock())
        if is_retry and not self._may_start(0):
            return False
        server = self._servers.pick(num_rollouts=self._group_size)
        if server is None:
            return False
        if is_retry:
            attempt = self._retries.popleft()
        elif draw := self._undispatched.popleft() if self._undispatched else self._sampler.take(self.step):
            attempt = _Try(draw=draw)
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
        self._tries[group_id] = attempt
        attempt.task = tasks.create_task(self._run(attempt), name=f"group-{group_id}")
        return True

    async def _run(self, attempt: _Try) -> None:
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
        # However many groups end at one moment, timers and sockets are looked at after each.
        async with self._accounting:
            if self._tries.get(draw.group_id) is not attempt:
                return  # ended meanwhile, and accounted for
            self._end(attempt)
            runs = (run for rollout in rollouts for sample in rollout.samples for run in sample.versions)
            if not (lost or error) and any(run.version < attempt.version for run in runs):
                lost = f"the server {attempt.server} answered with an older policy than it served: it was started again"
            if lost:
                self._lost(attempt, lost)
            elif error:
                logger.warning("group failed group=%s env=%s: %s", draw.group_id, draw.env, error)
                self._settle(
                    draw, partial(self._buffer.failed, draw.group_id, error, kind=kind, is_infrastructure=is_infrastructure)
                )
            else:
                self._settle(draw, partial(self._finish, draw, rollouts))
            self.changed.notify()
            self._on_group_end()
            await asyncio.sleep(0)

    def _settle(self, draw: Draw, end: Callable[[], None]) -> None:
        """Hand on how a group ended: at once, or in a deterministic run when its whole round has."""
        if not self._config.deterministic:
            end()
            return
        self._ended[draw.group_id] = end
        if not (self._undispatched or self._retries or self._tries):
            ended, self._ended = self._ended, {}
            for group_id in sorted(ended):
                ended[group_id]()

    def _finish(self, draw: Draw, rollouts: list[Rollout]) -> None:
        group = make_group(draw, rollouts, config=self._config, advantage=self._advantage)
        self._buffer.finished(group)
        self._sampler.finished(group, draw, step=self.step)

    def _cancel(self, attempt: _Try) -> None:
        if attempt.task is not None:
            attempt.task.cancel()
        self._end(attempt)

    def _end(self, attempt: _Try) -> None:
        del self._tries[attempt.draw.group_id]
        self._servers.release(attempt.server, num_rollouts=self._group_size)

    def _lost(self, attempt: _Try, reason: str) -> None:
        """Retry the group of a lost try after a pause that grows. After the last try the group failed."""
        draw, number = attempt.draw, attempt.number
        if number >= _MAX_TRIES:
            error = f"WorkerLost: lost {number} times, the last time because {reason}"
            self._settle(draw, partial(self._buffer.failed, draw.group_id, error, kind="WorkerLost", is_infrastructure=True))
            return
        pause_s = backoff_s(number - 1, first_s=_RETRY_PAUSE_S) if number > 1 else 0.0
        self._retries.append(_Try(draw=draw, number=number + 1, not_before=self._clock() + pause_s))
        logger.info("group is dispatched again group=%s tries=%s: %s", draw.group_id, number, reason)
