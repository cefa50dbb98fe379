"""Keeps groups in flight: decides when one may start, on which server, runs it, and hands the result to the buffer.

Consumes draws of the sampler. Produces finished groups in the buffer. Waits for its event, notified when a group ends, a batch is
formed, a policy is loaded or a server comes or goes, and for the moment at which a pause is over. Each group is a task of its
own; its failure costs that group only. A try that was lost with its server or its worker is made again, under the same id.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from trivet.algorithms.advantages import AdvantageFunction, AdvantageInputs
from trivet.algorithms.concurrency import TokenBucket
from trivet.algorithms.packing import truncate
from trivet.algorithms.staleness import may_dispatch
from trivet.backoff import backoff_s
from trivet.config.sections.orchestrator import OrchestratorConfig
from trivet.environments.port import EnvironmentPool
from trivet.errors import RolloutFailed, WorkerLost
from trivet.faults import reach
from trivet.orchestrator.buffer import GroupBuffer
from trivet.orchestrator.change_event import ChangeEvent
from trivet.orchestrator.dispatch_rounds import DispatchRounds
from trivet.orchestrator.sampler import Draw, ExampleSampler
from trivet.wire.groups import GroupRequest, SamplingArguments
from trivet.wire.rollouts import Group, GroupId, Rollout
from trivet.wire.versions import PolicyVersion, Step

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 5.0
"""The dispatcher looks again at least this often, so that a missed notification costs seconds and not the run."""
_STARTS_AT_ONCE = 64
"""Groups started before everybody else has a turn."""
_MAX_TRIES = 5
_RETRY_PAUSE_S = 1.0
"""Before the third try; doubles with each. The second follows at once, most likely on another server."""
_BURST_S = 5.0
"""Seconds' worth of `tasks_per_minute` that may start at once."""


class RunDrawnGroup(Protocol):
    """Runs the group of `draw` on one server and returns its scored rollouts."""

    async def __call__(self, draw: Draw, *, base_url: str) -> list[Rollout]: ...


class DispatchServers(Protocol):
    """What the dispatcher needs of the servers. Adapter: `client.server_pool.ServerPool`."""

    def pick(self, *, num_rollouts: int) -> str | None:
        """The base URL of a server that gets `num_rollouts` more, None while there is none."""
        ...

    def release(self, root: str, *, num_rollouts: int) -> None:
        """They have ended."""
        ...

    async def is_at_fault(self, root: str) -> bool:
        """After a group failed on `root`: whether the server does not answer as it should."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    rollouts_per_example: int
    rollouts_per_step: int
    """floor(batch_size * oversampling_factor)."""
    max_rollouts_in_flight: int
    max_async_level: int
    seq_len: int
    """Longer samples are cut."""
    is_truncated_worth_nothing: bool = False
    """A rollout that was cut gets reward 0."""
    tasks_per_minute: int | None = None
    """Rollouts started per minute."""
    groups_per_round: int | None = None
    """Of a deterministic run: the groups of a batch, which start together."""

    @classmethod
    def of(cls, config: OrchestratorConfig) -> "Limits":
        per_step = int(config.batch_size * config.oversampling_factor)
        return cls(
            rollouts_per_example=config.rollouts_per_example,
            rollouts_per_step=per_step,
            max_rollouts_in_flight=min(per_step, config.max_concurrent or per_step),
            max_async_level=config.max_async_level,
            seq_len=config.seq_len,
            is_truncated_worth_nothing=config.zero_truncated_completions,
            tasks_per_minute=config.tasks_per_minute,
            groups_per_round=config.batch_size // config.rollouts_per_example if config.deterministic else None,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class _Try:
    """One attempt at a group."""

    draw: Draw
    number: int
    server: str
    version: PolicyVersion
    """What the server held at least when it began."""
    task: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Retry:
    """A group whose last try was lost. It is still in flight, and keeps its place among those that are."""

    draw: Draw
    number: int
    not_before: float


class Dispatcher:
    """
    >>> dispatching = tasks.create_task(dispatcher.run())
    >>> dispatcher.step, dispatcher.version = Step(2), PolicyVersion(1)
    >>> dispatcher.changed.notify()
    """

    def __init__(
        self,
        *,
        sampler: ExampleSampler,
        buffer: GroupBuffer,
        run_group: RunDrawnGroup,
        servers: DispatchServers,
        advantage: AdvantageFunction,
        limits: Limits,
        on_group_end: Callable[[], None],
        resumed_draws: Sequence[Draw] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            on_group_end: called after every group that ended.
            resumed_draws: groups that were in flight when the checkpoint was made; they start first, under their old ids.
        """
        self._sampler = sampler
        self._buffer = buffer
        self._run_group = run_group
        self._servers = servers
        self._advantage = advantage
        self._limits = limits
        self._on_group_end = on_group_end
        self._clock = clock
        self._undispatched = deque(resumed_draws)
        self._retries: deque[_Retry] = deque()
        self._tries: dict[GroupId, _Try] = {}
        self._turn = asyncio.Lock()
        self._stale_checked_for = Step(0)
        self._rounds: DispatchRounds | None = None
        if limits.groups_per_round is not None:
            self._rounds = DispatchRounds(num_groups=limits.groups_per_round, max_async_level=limits.max_async_level)
        self._bucket: TokenBucket | None = None
        if limits.tasks_per_minute is not None:
            burst = max(limits.rollouts_per_example, limits.tasks_per_minute / 60 * _BURST_S)
            self._bucket = TokenBucket(per_minute=limits.tasks_per_minute, burst=burst, now=clock())
        self.changed = ChangeEvent()
        self.step = Step(1)
        """The batch being filled."""
        self.version = PolicyVersion(0)
        """What the servers hold at least."""
        self.max_in_flight = limits.max_rollouts_in_flight
        """Rollouts; adapted to the servers' load."""

    @property
    def undispatched_draws(self) -> list[Draw]:
        """Groups of the checkpoint that were not started again yet: still owed, and part of the next checkpoint."""
        return list(self._undispatched)

    @property
    def rollouts_in_flight(self) -> int:
        num_ended = self._rounds.num_ended if self._rounds else 0
        return (self._buffer.num_in_flight - num_ended) * self._limits.rollouts_per_example

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._cancel_stale()
                self._draw_round()
                num_started = 0
                while (pause_s := self._pause_s()) == 0 and self._start_next(tasks):
                    num_started += 1
                    if num_started % _STARTS_AT_ONCE == 0:
                        await asyncio.sleep(0)
                await self.changed.wait(min(pause_s or _IDLE_WAIT_S, _IDLE_WAIT_S))

    def server_down(self, root: str) -> None:
        """Every try on the server at `root` is lost."""
        for attempt in [attempt for attempt in self._tries.values() if attempt.server == root]:
            if attempt.task is not None:
                attempt.task.cancel()
            self._end(attempt)
            self._lost(attempt, f"the server {root} was set aside")
        self.changed.notify()
        self._on_group_end()

    def _pause_s(self) -> float:
        """Seconds until the next group may start; 0 when one may now."""
        now, limits = self._clock(), self._limits
        in_flight = self.rollouts_in_flight
        has_room = in_flight + limits.rollouts_per_example <= max(self.max_in_flight, limits.rollouts_per_example)
        ahead = in_flight + self._buffer.num_ready * limits.rollouts_per_example
        if self._is_retry_due(now) or (has_room and self._may_start(ahead)):
            return self._bucket_wait_s(now)
        return self._retries[0].not_before - now if self._retries else _IDLE_WAIT_S

    def _is_retry_due(self, now: float) -> bool:
        """A group whose last try was lost has its place in flight already."""
        return bool(self._retries) and self._retries[0].not_before <= now

    def _draw_round(self) -> None:
        """Of a deterministic run: draw what the batch still lacks, once every group drawn before has ended."""
        if self._rounds is None or self._undispatched or self._buffer.num_in_flight:
            return
        num_ready = self._buffer.num_ready
        for _ in range(self._rounds.num_to_draw(step=self.step, version=self.version, num_ready=num_ready)):
            if (draw := self._sampler.take(self.step)) is not None:
                self._undispatched.append(draw)

    def _may_start(self, rollouts_ahead: int) -> bool:
        if self._rounds is not None:
            return bool(self._undispatched or self._retries)
        return may_dispatch(
            step=self.step,
            version=self.version,
            rollouts_ahead=rollouts_ahead,
            rollouts_per_step=self._limits.rollouts_per_step,
            max_async_level=self._limits.max_async_level,
        )

    def _bucket_wait_s(self, now: float) -> float:
        return self._bucket.wait_s(self._limits.rollouts_per_example, now=now) if self._bucket else 0.0

    def _start_next(self, tasks: asyncio.TaskGroup) -> bool:
        """Start a lost group, else one of the checkpoint, else a new one; False when there is no group or no server for it."""
        is_retry = self._is_retry_due(self._clock())
        if is_retry and not self._may_start(0):
            return False
        num_rollouts = self._limits.rollouts_per_example
        server = self._servers.pick(num_rollouts=num_rollouts)
        if server is None:
            return False
        number = 1
        if is_retry:
            retry = self._retries.popleft()
            draw, number = retry.draw, retry.number
        else:
            draw = self._undispatched.popleft() if self._undispatched else self._sampler.take(self.step)
        if draw is None:
            self._servers.release(server, num_rollouts=num_rollouts)
            return False
        if self._bucket:
            self._bucket.take(num_rollouts)
        reach("dispatch.before", step=self.step)
        self._buffer.dispatched(draw, version=self.version, server=server)
        reach("dispatch.after", step=self.step)
        attempt = _Try(draw=draw, number=number, server=server, version=self.version)
        self._tries[draw.group_id] = attempt
        attempt.task = tasks.create_task(self._run(attempt), name=f"group-{draw.group_id}")
        return True

    def _cancel_stale(self) -> None:
        if self.step == self._stale_checked_for:
            return  # a group in flight grows old with the step alone
        self._stale_checked_for = self.step
        for group_id in self._buffer.stale_in_flight(self.step):
            attempt = self._tries.get(group_id)
            if attempt is None:
                continue  # waits for its next try, which starts from a newer policy
            if attempt.task is not None:
                attempt.task.cancel()
            self._end(attempt)
            self._buffer.cancelled(group_id, "stale")

    async def _run(self, attempt: _Try) -> None:
        draw = attempt.draw
        lost, error, kind, rollouts = "", "", "", list[Rollout]()
        try:
            rollouts = await self._run_group(draw, base_url=attempt.server)
        except WorkerLost as exc:
            lost = str(exc)
        except Exception as exc:  # noqa: BLE001  an environment is the user's code: what it raises costs this group only
            error = f"{type(exc).__name__}: {exc}"
            kind = exc.kind if isinstance(exc, RolloutFailed) else type(exc).__name__
            if await self._servers.is_at_fault(attempt.server):
                lost = f"the server {attempt.server} failed: {error}"
        # However many groups end at one moment, each takes a turn of the event loop of its own: timers and sockets are looked at
        # between them.
        async with self._turn:
            self._account(attempt, rollouts, lost=lost, error=error, kind=kind)
            await asyncio.sleep(0)

    def _account(self, attempt: _Try, rollouts: list[Rollout], *, lost: str, error: str, kind: str) -> None:
        """What becomes of a group whose try is over."""
        draw = attempt.draw
        if self._tries.get(draw.group_id) is not attempt:
            return  # ended meanwhile, and accounted for
        self._end(attempt)
        if not (lost or error) and _is_older(rollouts, attempt.version):
            lost = f"the server {attempt.server} answered with an older policy than it held: it was started again"
        if lost:
            self._lost(attempt, lost)
        elif error:
            logger.warning("group failed group=%s env=%s: %s", draw.group_id, draw.env, error)
            self._settle(draw.group_id, lambda: self._buffer.failed(draw.group_id, error, kind=kind))
        else:
            self._settle(draw.group_id, lambda: self._finish(draw, rollouts))
        self.changed.notify()
        self._on_group_end()

    def _settle(self, group_id: GroupId, end: Callable[[], None]) -> None:
        """Hand on how a group ended: at once, or, deterministic, when its whole round has, in the order of their ids."""
        if self._rounds is None:
            end()
            return
        self._rounds.add_ended(group_id, end)
        if not (self._undispatched or self._retries or self._tries):
            self._rounds.release()

    def _finish(self, draw: Draw, rollouts: list[Rollout]) -> None:
        group = self._make_group(draw, rollouts)
        self._buffer.finished(group)
        self._sampler.finished(group, draw, step=self.step)

    def _end(self, attempt: _Try) -> None:
        del self._tries[attempt.draw.group_id]
        self._servers.release(attempt.server, num_rollouts=self._limits.rollouts_per_example)

    def _lost(self, attempt: _Try, reason: str) -> None:
        """Nothing came of `attempt`: the group is tried again, after a pause that grows, or failed."""
        group_id, number = attempt.draw.group_id, attempt.number
        if number >= _MAX_TRIES:
            error = f"WorkerLost: lost {number} times, the last time because {reason}"
            self._settle(group_id, lambda: self._buffer.failed(group_id, error, kind="WorkerLost"))
            return
        logger.info("group is dispatched again group=%s tries=%s: %s", group_id, number, reason)
        pause_s = backoff_s(number - 1, first_s=_RETRY_PAUSE_S) if number > 1 else 0.0
        self._retries.append(_Retry(draw=attempt.draw, number=number + 1, not_before=self._clock() + pause_s))

    def _make_group(self, draw: Draw, rollouts: list[Rollout]) -> Group:
        group = Group(group_id=draw.group_id, env=draw.env, example_id=draw.example_id, rollouts=rollouts)
        for rollout in rollouts:
            rollout.samples = [truncate(sample, seq_len=self._limits.seq_len) for sample in rollout.samples]
            if self._limits.is_truncated_worth_nothing and rollout.is_truncated:
                rollout.reward = 0.0
        for rollout, advantage in zip(rollouts, self._advantage(AdvantageInputs.of(group)), strict=True):
            rollout.advantage = float(advantage)
        return group


def group_runner(
    pool: EnvironmentPool, *, sampling_of: Callable[[Draw], SamplingArguments], rollouts_per_example: int
) -> RunDrawnGroup:
    """A `RunDrawnGroup` over a pool of environments; all requests of a group go to one server, so that its prompt is computed once.

    Args:
        sampling_of: asked when the group starts.
    """

    async def run(draw: Draw, *, base_url: str) -> list[Rollout]:
        return await pool.run_group(
            GroupRequest(
                group_id=draw.group_id,
                env=draw.env,
                example_id=draw.example_id,
                num_rollouts=rollouts_per_example,
                base_url=base_url,
                sampling=sampling_of(draw),
            )
        )

    return run


def _is_older(rollouts: Sequence[Rollout], version: PolicyVersion) -> bool:
    return any(run.version < version for rollout in rollouts for sample in rollout.samples for run in sample.versions)
