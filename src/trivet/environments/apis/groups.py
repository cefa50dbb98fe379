"""Plays the rollouts of one group at the same time, within one limit of time, and tells what made a rollout fail.

A rollout that infrastructure failed is played again. One that fails on the policy's own answer is not: played until an answer does
not break the environment, the group would hold better answers than the policy gives. The type of an error tells which it was.
Types are compared by name, since each release of verifiers has others and an environment brings its own clients.
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
"""Attempts at one rollout that infrastructure fails, the first included. Then its whole group fails."""
_RETRY_DELAY_S = 1.0
"""Wait before the second attempt; doubled before each later one."""

_INFRASTRUCTURE = frozenset(
    {
        *("InfraError", "SandboxError", "ToolsetError", "InterceptionError", "TunnelError"),  # verifiers, v0 and v1
        *("ConnectionError", "TimeoutError", "gaierror"),  # Python; `requests` has the first too
        *("APIConnectionError", "TransportError", "NetworkError", "ClientConnectionError", "ClientPayloadError", "ReadTimeout"),
    }
)
"""Types that name infrastructure, with the types derived from them; the last line: openai, httpx, httpcore, aiohttp, requests."""
_MODEL = "ModelError"
"""verifiers' v0 type for whatever a model request raised. It counts by its cause; without one the server answered nonsense."""
_ERRNOS = frozenset({errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENETUNREACH, errno.EHOSTUNREACH})
"""Errors of a machine that lacks something. Other errors of the operating system may come from a path that the model chose."""
_PASSING_STATUS = frozenset({408, 409, 425, 429})
"""HTTP statuses below 500 that a later request may not get. Others refuse what was asked, which the policy may have written."""

PlayedT = TypeVar("PlayedT")


class Stage(StrEnum):
    """The two stages of a group: it waits for the model, or for the environment's own code."""

    GENERATING = "generating"
    SCORING = "scoring"


class StageBoard:
    """The groups that run now, each with its stage. Another thread reads it: a blocked event loop cannot answer itself."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: dict[object, tuple[Stage, int, float]] = {}

    @contextmanager
    def stage(self, stage: Stage, *, num_rollouts: int) -> Iterator[None]:
        """Count `num_rollouts` rollouts in `stage` for as long as the block runs."""
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
    """Limit the time of a group, from its first request to its last score; raises RolloutFailed when it is over."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as exc:
        raise RolloutFailed(
            f"group {request.group_id} of environment {request.env!r} was not done after rollout_timeout_s ({timeout_s:g} s); "
            "raise it if rollouts may take longer",
            kind="TimeoutError",
        ) from exc


async def play_group(play: Callable[[int], Awaitable[PlayedT]], request: GroupRequest) -> list[tuple[PlayedT, int]]:
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
            except RolloutFailed as exc:
                failures.append(exc)
            except (Exception, SystemExit, KeyboardInterrupt) as exc:  # noqa: BLE001  the user's code: it costs this rollout
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
            running = [tasks.create_task(attempt(index), name=name) for index, name in enumerate(names)]
    except ExceptionGroup as failed:  # the first failure has ended the others
        raise failed.exceptions[0] from None
    return [task.result() for task in running]


def is_infrastructure(error: BaseException, *, has_sampled: bool = True) -> bool:
    """Return whether `error`, or what caused it, is a failure of infrastructure, as `names_infrastructure` does."""
    chain, statuses = [error], list[int]()
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    for link in chain:  # a client's error carries the HTTP status on itself or on its response
        for holder in (link, getattr(link, "response", None)):
            values = [getattr(holder, name, None) for name in ("status_code", "status")]
            statuses += [value for value in values if isinstance(value, int) and 400 <= value < 600]
    if not statuses:
        if any(isinstance(link, OSError) and link.errno in _ERRNOS for link in chain):
            return True
        if any(base.__name__ == _MODEL for base in type(chain[-1]).__mro__):
            return True
    names = {base.__name__ for link in chain for base in type(link).__mro__}
    return names_infrastructure(names, status_code=statuses[0] if statuses else None, has_sampled=has_sampled)


def names_infrastructure(names: Iterable[str], *, status_code: int | None, has_sampled: bool) -> bool:
    """Return whether an error that is known by its type is a failure of infrastructure.

    Args:
        names: of the type and of those that it is derived from, as far as they are known.
        status_code: the HTTP status that it carries. If there is one, it decides.
        has_sampled: the policy has said something. What fails before cannot be its doing.
    """
    if status_code is not None:
        return status_code >= 500 or status_code in _PASSING_STATUS
    return not has_sampled or not _INFRASTRUCTURE.isdisjoint(names)
