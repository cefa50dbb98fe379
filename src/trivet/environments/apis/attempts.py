"""Plays the rollouts of one group at the same time, all within one limit of time. What infrastructure failed is played again."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from trivet.backoff import backoff_s
from trivet.environments.apis.causes import is_infrastructure
from trivet.environments.apis.messages import describe
from trivet.errors import RolloutFailed
from trivet.wire.rollouts import GroupId

logger = logging.getLogger(__name__)

_MAX_ATTEMPTS = 3
"""Attempts at one rollout that infrastructure fails, the first included. Then its whole group fails."""
_RETRY_DELAY_S = 1.0
"""Wait before the second attempt; doubled before each later one."""

PlayedT = TypeVar("PlayedT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempted(Generic[PlayedT]):
    """A rollout that was played to its end."""

    result: PlayedT
    num_retries: int
    """Attempts before it, which infrastructure failed."""


@asynccontextmanager
async def within(timeout_s: float | None, *, env: str, group_id: GroupId) -> AsyncIterator[None]:
    """Limit the time of a group, from its first request to its last score.

    Raises:
        RolloutFailed: the block was not done in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as exc:
        raise RolloutFailed(
            f"group {group_id} of environment {env!r} was not done after rollout_timeout_s ({timeout_s:g} s); "
            "raise it if rollouts may take longer",
            kind="TimeoutError",
        ) from exc


async def play_group(
    play: Callable[[int], Awaitable[PlayedT]], *, num_rollouts: int, env: str, group_id: GroupId
) -> list[Attempted[PlayedT]]:
    """Return what `play` returns for each index of the group.

    Raises:
        RolloutFailed: `play` raised what infrastructure is not the cause of, or raised on every attempt at one rollout; the message
            is then the first error.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(_attempt(play, index, env=env, group_id=group_id), name=f"group-{group_id}-{index}")
                for index in range(num_rollouts)
            ]
    except ExceptionGroup as failed:  # the first failure has ended the others
        raise failed.exceptions[0] from None
    return [task.result() for task in running]


async def _attempt(play: Callable[[int], Awaitable[PlayedT]], index: int, *, env: str, group_id: GroupId) -> Attempted[PlayedT]:
    first: RolloutFailed | None = None
    for attempt in range(_MAX_ATTEMPTS):
        if attempt:
            await asyncio.sleep(backoff_s(attempt, first_s=_RETRY_DELAY_S))
        try:
            return Attempted(result=await play(index), num_retries=attempt)
        except (Exception, SystemExit, KeyboardInterrupt) as exc:  # noqa: BLE001  the user's code: it costs this rollout
            failure = as_failure(exc)
        logger.warning("rollout failed env=%s group=%s index=%s attempt=%s: %s", env, group_id, index, attempt + 1, failure)
        if not failure.is_infrastructure:
            raise failure
        first = first or failure
    assert first is not None
    raise first


def as_failure(error: BaseException) -> RolloutFailed:
    """Return `error` as the failure of a rollout, with its type and its cause."""
    if isinstance(error, RolloutFailed):
        return error
    failure = RolloutFailed(describe(error), kind=type(error).__name__, is_infrastructure=is_infrastructure(error))
    failure.__cause__ = error
    return failure
