"""Plays the rollouts of one group at the same time, within one time limit, and decides which failed rollouts are played again.

A rollout is played again if infrastructure made it fail, such as a lost connection. It is not played again if the policy's own
answer made it fail: otherwise only answers that do not break the environment would stay in the group, and these are better than
the policy's. The type of the error decides. Types are compared by name, because each release of verifiers has other types, and an
environment brings its own clients.
"""

import asyncio
import errno
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from enum import StrEnum
from typing import TypeVar

from trivet.backoff import backoff_s
from trivet.environments.apis.messages import describe
from trivet.errors import RolloutFailed
from trivet.wire.groups import GroupRequest

logger = logging.getLogger(__name__)

_MAX_ATTEMPTS = 3
"""Attempts at one rollout, the first included. If infrastructure makes all of them fail, the whole group fails."""
_RETRY_DELAY_S = 1.0
"""Seconds before the second attempt; doubled before each later attempt."""

_INFRASTRUCTURE = frozenset(
    {
        *("InfraError", "SandboxError", "ToolsetError", "InterceptionError", "TunnelError"),  # verifiers, v0 and v1
        *("ConnectionError", "TimeoutError", "gaierror"),  # Python; `requests` has the first too
        *("APIConnectionError", "TransportError", "NetworkError", "ClientConnectionError", "ClientPayloadError", "ReadTimeout"),
    }
)
"""Error types of infrastructure; types derived from them count too. The last line has types of openai, httpx, httpcore, aiohttp
and requests."""
_MODEL_ERROR = "ModelError"
"""verifiers' v0 type around an error of a model request. Its cause decides; if it has no cause, the server's answer was invalid."""
_ERRNOS = frozenset({errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENETUNREACH, errno.EHOSTUNREACH})
"""Errors of a machine without free resources or network. Other errors of the operating system may come from a path that the model
chose."""
_TEMPORARY_STATUSES = frozenset({408, 409, 425, 429})
"""HTTP statuses below 500 that a later request may not get. Others refuse the request, which the policy may have written."""

PlayedT = TypeVar("PlayedT")


class Stage(StrEnum):
    """The two stages of a group."""

    GENERATING = "generating"
    """The rollouts are played: most of the time they wait for the model."""
    SCORING = "scoring"
    """The environment's reward functions run."""


class StageBoard:
    """The groups that run now, each with its stage. The thread that sends pulses reads it while the event loop may be blocked."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: dict[object, tuple[Stage, int, float]] = {}
        """Stage, number of rollouts and start in monotonic seconds of each group, by a key of its own."""

    @contextmanager
    def stage(self, stage: Stage, *, num_rollouts: int) -> Iterator[None]:
        """Count `num_rollouts` rollouts in `stage` while the `with` block runs."""
        key = object()
        self._entries[key] = (stage, num_rollouts, self._clock())
        try:
            yield
        finally:
            del self._entries[key]

    def num_rollouts(self, stage: Stage) -> int:
        """Return the number of rollouts in a stage."""
        return sum(count for found, count, _ in list(self._entries.values()) if found is stage)

    def scoring_for_s(self) -> float:
        """Return the age in seconds of the oldest group that is being scored; 0 without one."""
        now = self._clock()
        return now - min((since for stage, _, since in list(self._entries.values()) if stage is Stage.SCORING), default=now)


@asynccontextmanager
async def limit_time(timeout_s: float | None, request: GroupRequest) -> AsyncIterator[None]:
    """Limit the time of the `with` block, which plays and scores a group. Raises RolloutFailed when the time is over."""
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            yield
    except TimeoutError as exc:
        if not limit.expired():  # the environment's own time-out
            raise
        raise RolloutFailed(
            f"group {request.group_id} of environment {request.env!r} was not done after rollout_timeout_s ({timeout_s:g} s); "
            "raise it if rollouts may take longer",
            kind="TimeoutError",
        ) from exc


async def play_group(play: Callable[[int], Awaitable[PlayedT]], request: GroupRequest) -> list[tuple[PlayedT, int]]:
    """Play every rollout of a group with `play`, and again after failures of infrastructure.

    Args:
        play: plays the rollout of an index.

    Returns:
        For each index the result of `play`, and the number of failed attempts before it.

    Raises:
        RolloutFailed: `play` failed for another reason than infrastructure, or every attempt at one rollout failed. The message
            then has the first error.
    """

    async def play_with_retries(index: int) -> tuple[PlayedT, int]:
        failures: list[RolloutFailed] = []
        while True:
            try:
                return await play(index), len(failures)
            except RolloutFailed as exc:
                failures.append(exc)
            except (Exception, SystemExit, KeyboardInterrupt) as exc:  # noqa: BLE001  whatever user code raises, only this group fails
                failures.append(RolloutFailed(describe(exc), kind=type(exc).__name__, is_infrastructure=is_infrastructure(exc)))
                failures[-1].__cause__ = exc
            where = f"env={request.env} group={request.group_id} index={index} attempt={len(failures)}"
            logger.warning("rollout failed %s: %s", where, failures[-1])
            if not failures[-1].is_infrastructure:
                raise failures[-1]
            if len(failures) == _MAX_ATTEMPTS:
                raise failures[0]
            await asyncio.sleep(backoff_s(len(failures), first_s=_RETRY_DELAY_S))

    try:
        async with asyncio.TaskGroup() as tasks:
            names = [f"group-{request.group_id}-{index}" for index in range(request.num_rollouts)]
            running = [tasks.create_task(play_with_retries(index), name=name) for index, name in enumerate(names)]
    except ExceptionGroup as failed:  # the first failure has cancelled the other rollouts
        first = failed.exceptions[0]
        raise first from first.__cause__
    return [task.result() for task in running]


def is_infrastructure(error: BaseException, *, has_sampled: bool = True) -> bool:
    """Return whether infrastructure is the cause of `error`, judged by the error and its chain of causes.

    Args:
        has_sampled: see `is_infrastructure_type`.
    """
    causes, statuses = [error], list[int]()
    while (cause := causes[-1].__cause__) is not None and cause not in causes:
        causes.append(cause)
    for cause in causes:  # an error of an HTTP client has the status as its own attribute or as that of its response
        for holder in (cause, getattr(cause, "response", None)):
            values = [getattr(holder, name, None) for name in ("status_code", "status")]
            statuses += [value for value in values if isinstance(value, int) and 400 <= value < 600]
    if not statuses:
        if any(isinstance(cause, OSError) and cause.errno in _ERRNOS for cause in causes):
            return True
        if any(base.__name__ == _MODEL_ERROR for base in type(causes[-1]).__mro__):
            return True
    names = {base.__name__ for cause in causes for base in type(cause).__mro__}
    return is_infrastructure_type(names, status_code=statuses[0] if statuses else None, has_sampled=has_sampled)


def is_infrastructure_type(names: Iterable[str], *, status_code: int | None, has_sampled: bool) -> bool:
    """Return whether infrastructure is the cause of an error of which only the type and the status are known.

    Args:
        names: names of the error's type and of the types that it is derived from, as far as they are known.
        status_code: the error's HTTP status. If there is one, it decides alone.
        has_sampled: the policy has sampled something in the rollout. It cannot be the cause of an earlier error.
    """
    if status_code is not None:
        return status_code >= 500 or status_code in _TEMPORARY_STATUSES
    return not has_sampled or not _INFRASTRUCTURE.isdisjoint(names)
