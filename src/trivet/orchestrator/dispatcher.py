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
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from trivet.algorithms.advantages import AdvantageFunction
from trivet.errors import RolloutFailed, WorkerLost
from trivet.faults import reach
from trivet.orchestrator.buffer import GroupBuffer
from trivet.orchestrator.change_event import ChangeEvent
from trivet.orchestrator.dispatch_limits import Limits
from trivet.orchestrator.dispatch_rounds import DispatchRounds
from trivet.orchestrator.group_runner import RunDrawnGroup, has_older_tokens, make_group
from trivet.orchestrator.retry_queue import RetryQueue
from trivet.orchestrator.sampler import Draw, ExampleSampler
from trivet.wire.rollouts import GroupId, Rollout
from trivet.wire.versions import PolicyVersion, Step

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 5.0
"""The dispatcher looks again at least this often, so that a missed notification costs seconds and not the run."""
_STARTS_AT_ONCE = 64
"""Groups started before the event loop runs other tasks. With all at once, sockets would wait for thousands of starts."""


class DispatchServers(Protocol):
    """The servers as the dispatcher sees them. Adapter: `client.server_pool.ServerPool`."""

    def pick(self, *, num_rollouts: int) -> str | None:
        """Return the base URL of a server that gets `num_rollouts` more, None while there is none."""
        ...

    def release(self, root: str, *, num_rollouts: int) -> None:
        """Count the rollouts as ended."""
        ...

    async def is_at_fault(self, root: str) -> bool:
        """Return whether the server at `root`, where a group failed, does not answer as it should."""
        ...

    def subscribe(self, *, on_down: Callable[[str], None], on_up: Callable[[], None]) -> None:
        """Call `on_down` with the address of a server that is lost, and `on_up` after one came."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class _Try:
    """One attempt at a group."""

    draw: Draw
    number: int
    server: str
    version: PolicyVersion
    """The policy that the server served when the try began, or a newer one."""
    task: asyncio.Task[None] | None = None


class Dispatcher:
    """Starts groups and accounts for how each ended."""

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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a dispatcher with nothing in flight, and subscribe it to the servers.

        Args:
            on_group_end: called after every group that ended.
        """
        self._sampler = sampler
        self._buffer = buffer
        self._run_group = run_group
        self._servers = servers
        self._advantage = advantage
        self._limits = limits
        self._on_group_end = on_group_end
        self._clock = clock
        self._undispatched = deque[Draw]()
        self._retries = RetryQueue()
        self._tries: dict[GroupId, _Try] = {}
        self._turn = asyncio.Lock()
        self._stale_checked_for = Step(0)
        self._rounds: DispatchRounds | None = None
        if limits.groups_per_round is not None:
            self._rounds = DispatchRounds(num_groups=limits.groups_per_round, max_async_level=limits.max_async_level)
        self._bucket = limits.make_bucket(clock())
        self.changed = ChangeEvent()
        self.step = Step(1)
        """The batch being filled."""
        self.version = PolicyVersion(0)
        """The policy that the servers serve, or a newer one."""
        self.max_in_flight = limits.max_rollouts_in_flight
        """Rollouts; adapted to the servers' load."""
        servers.subscribe(on_down=self.server_down, on_up=self.changed.notify)

    @property
    def undispatched_draws(self) -> list[Draw]:
        """Groups of the checkpoint that were not started again yet: part of the next checkpoint too."""
        return list(self._undispatched)

    @property
    def rollouts_in_flight(self) -> int:
        """Rollouts of all groups in flight."""
        num_ended = self._rounds.num_ended if self._rounds else 0
        return (self._buffer.num_in_flight - num_ended) * self._limits.rollouts_per_example

    async def run(self) -> None:
        """Start groups as they may start, until cancelled."""
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
            if attempt.task is not None:
                attempt.task.cancel()
            self._end(attempt)
            self._lost(attempt, f"the server {root} was marked unhealthy")
        self.changed.notify()
        self._on_group_end()

    def _pause_s(self) -> float:
        """Return the seconds until the next group may start; 0 when one may now."""
        now, limits = self._clock(), self._limits
        in_flight = self.rollouts_in_flight
        has_place = in_flight + limits.rollouts_per_example <= max(self.max_in_flight, limits.rollouts_per_example)
        ahead = in_flight + self._buffer.num_ready * limits.rollouts_per_example
        # A group whose last try was lost has its place in flight already.
        if self._retries.is_due(now) or (has_place and self._may_start(ahead)):
            return self._bucket.wait_s(limits.rollouts_per_example, now=now) if self._bucket else 0.0
        return self._retries.wait_s(now, otherwise=_IDLE_WAIT_S)

    def _draw_round(self) -> None:
        """Draw what the batch still lacks in a deterministic run, once every group drawn before has ended."""
        if self._rounds is None or self._undispatched or self._buffer.num_in_flight:
            return
        for _ in range(self._rounds.num_to_draw(step=self.step, version=self.version, num_ready=self._buffer.num_ready)):
            if (draw := self._sampler.take(self.step)) is not None:
                self._undispatched.append(draw)

    def _may_start(self, rollouts_ahead: int) -> bool:
        if self._rounds is not None:
            return bool(self._undispatched or self._retries)
        return self._limits.may_dispatch(step=self.step, version=self.version, rollouts_ahead=rollouts_ahead)

    def _start_next(self, tasks: asyncio.TaskGroup) -> bool:
        """Start a lost group, else one of the checkpoint, else a new one; False when there is no group or no server for it."""
        is_retry = self._retries.is_due(self._clock())
        if is_retry and not self._may_start(0):
            return False
        num_rollouts = self._limits.rollouts_per_example
        server = self._servers.pick(num_rollouts=num_rollouts)
        if server is None:
            return False
        number = 1
        if is_retry:
            retry = self._retries.take()
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
        lost, error, failure, rollouts = "", "", None, list[Rollout]()
        try:
            rollouts = await self._run_group(attempt.draw, base_url=attempt.server)
        except WorkerLost as exc:
            lost = str(exc)
        except Exception as exc:  # noqa: BLE001  an environment is the user's code: what it raises costs this group only
            error = f"{type(exc).__name__}: {exc}"
            failure = exc if isinstance(exc, RolloutFailed) else RolloutFailed(error, kind=type(exc).__name__)
            if await self._servers.is_at_fault(attempt.server):
                lost = f"the server {attempt.server} failed: {error}"
        # However many groups end at one moment, each takes a turn of the event loop of its own: timers and sockets are looked at
        # between them.
        async with self._turn:
            self._account(attempt, rollouts, lost=lost, error=error, failure=failure)
            await asyncio.sleep(0)

    def _account(self, attempt: _Try, rollouts: list[Rollout], *, lost: str, error: str, failure: RolloutFailed | None) -> None:
        """Retry the group whose try is over, or settle it as failed or finished."""
        draw = attempt.draw
        if self._tries.get(draw.group_id) is not attempt:
            return  # ended meanwhile, and accounted for
        self._end(attempt)
        if not (lost or failure) and has_older_tokens(rollouts, attempt.version):
            lost = f"the server {attempt.server} answered with an older policy than it served: it was started again"
        if lost:
            self._lost(attempt, lost)
        elif failure is not None:
            logger.warning("group failed group=%s env=%s: %s", draw.group_id, draw.env, error)
            kind, is_infrastructure = failure.kind, failure.is_infrastructure
            self._settle(
                draw.group_id,
                lambda: self._buffer.failed(draw.group_id, error, kind=kind, is_infrastructure=is_infrastructure),
            )
        else:
            self._settle(draw.group_id, lambda: self._finish(draw, rollouts))
        self.changed.notify()
        self._on_group_end()

    def _settle(self, group_id: GroupId, end: Callable[[], None]) -> None:
        """Hand on how a group ended: at once, or in a deterministic run when its whole round has."""
        if self._rounds is None:
            end()
            return
        self._rounds.add_ended(group_id, end)
        if not (self._undispatched or self._retries or self._tries):
            self._rounds.release()

    def _finish(self, draw: Draw, rollouts: list[Rollout]) -> None:
        group = make_group(draw, rollouts, limits=self._limits, advantage=self._advantage)
        self._buffer.finished(group)
        self._sampler.finished(group, draw, step=self.step)

    def _end(self, attempt: _Try) -> None:
        del self._tries[attempt.draw.group_id]
        self._servers.release(attempt.server, num_rollouts=self._limits.rollouts_per_example)

    def _lost(self, attempt: _Try, reason: str) -> None:
        """Retry the group of a lost try after a pause that grows. After the last try the group failed."""
        group_id, number = attempt.draw.group_id, attempt.number
        if self._retries.add(attempt.draw, lost_tries=number, now=self._clock()):
            logger.info("group is dispatched again group=%s tries=%s: %s", group_id, number, reason)
            return
        error = f"WorkerLost: lost {number} times, the last time because {reason}"
        self._settle(group_id, lambda: self._buffer.failed(group_id, error, kind="WorkerLost", is_infrastructure=True))
