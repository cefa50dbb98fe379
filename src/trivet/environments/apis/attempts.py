"""Plays the rollouts of one group at the same time, all within one limit of time. What infrastructure failed is played again."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

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


@asynccontextmanager
async def limit_time(timeout_s: float | None, *, env: str, group_id: GroupId) -> AsyncIterator[None]:
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
) -> list[tuple[PlayedT, int]]:
    """Return what `play` returns for each index of the group, and the attempts before it that infrastructure failed.

    Raises:
        RolloutFailed: `play` raised what infrastructure is not the cause of, or raised on every attempt at one rollout; the message
            is then the first error.
    """

    async def attempt(index: int) -> tuple[PlayedT, int]:
        failures: list[RolloutFailed] = []
        while True:
            try:
                return await play(index), len(failures)
            except (Exception, SystemExit, KeyboardInterrupt) as exc:  # noqa: BLE001  the user's code: it costs this rollout
                failures.append(_as_failure(exc))
            logger.warning(
                "rollout failed env=%s group=%s index=%s attempt=%s: %s", env, group_id, index, len(failures), failures[-1]
            )
            if not failures[-1].is_infrastructure:
                raise failures[-1]
            if len(failures) == _MAX_ATTEMPTS:
                raise failures[0]
            await asyncio.sleep(backoff_s(len(failures), first_s=_RETRY_DELAY_S))

    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(attempt(index), name=f"group-{group_id}-{index}") for index in range(num_rollouts)]
    except ExceptionGroup as failed:  # the first failure has ended the others
        raise failed.exceptions[0] from None
    return [task.result() for task in running]


def _as_failure(error: BaseException) -> RolloutFailed:
    """Return `error` as the failure of a rollout, with its type and its cause."""
    if isinstance(error, RolloutFailed):
        return error
    failure = RolloutFailed(describe(error), kind=type(error).__name__, is_infrastructure=is_infrastructure(error))
    failure.__cause__ = error
    return failure
