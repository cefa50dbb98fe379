"""Plays the rollouts of one group at the same time, each with several attempts, all within one limit of time."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from trivet.backoff import backoff_s
from trivet.environments.apis.messages import describe
from trivet.errors import RolloutFailed
from trivet.wire.rollouts import GroupId

logger = logging.getLogger(__name__)

_MAX_ATTEMPTS = 3
"""Attempts at one rollout, the first included. Then its whole group fails."""
_RETRY_DELAY_S = 1.0
"""Wait before the second attempt; doubled before each later one."""

PlayedT = TypeVar("PlayedT")


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
) -> list[PlayedT]:
    """Return what `play` returns for each index of the group.

    Raises:
        RolloutFailed: `play` raised on every attempt at one rollout; the message is the first error.
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


async def _attempt(play: Callable[[int], Awaitable[PlayedT]], index: int, *, env: str, group_id: GroupId) -> PlayedT:
    first: BaseException | None = None
    for attempt in range(_MAX_ATTEMPTS):
        if attempt:
            await asyncio.sleep(backoff_s(attempt, first_s=_RETRY_DELAY_S))
        try:
            return await play(index)
        except (Exception, SystemExit, KeyboardInterrupt) as exc:  # noqa: BLE001  the user's code: it costs this rollout
            first = first or exc
        logger.warning(
            "rollout failed env=%s group=%s index=%s attempt=%s: %s", env, group_id, index, attempt + 1, describe(first)
        )
    assert first is not None
    if isinstance(first, RolloutFailed):
        raise first
    raise RolloutFailed(describe(first), kind=type(first).__name__) from first
