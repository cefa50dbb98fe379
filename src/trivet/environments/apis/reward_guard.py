"""Keeps an error of a reward function from counting as a reward of 0, and a sys.exit in one from ending the process.

verifiers' v0 API catches what a reward function raises, logs it and counts 0: the model would be trained on a bug. Its v1 API fails
the whole episode, and lets a sys.exit end the process. Each adapter wraps every reward function; whoever scores a group collects
what was raised, and decides.
"""

import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from trivet.environments.apis.messages import cut
from trivet.errors import RolloutFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardError:
    """An exception that one call of a reward function raised."""

    function: str
    kind: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Collection:
    errors: list[RewardError]
    value_on_error: float | None


_collection: ContextVar[_Collection | None] = ContextVar("reward_errors", default=None)

_GUARDED = "__trivet_guarded__"


@contextmanager
def collect_reward_errors(*, value_on_error: float | None = None) -> Iterator[list[RewardError]]:
    """Collect what reward functions raise inside the `with`, in tasks started there too.

    Args:
        value_on_error: is returned by a reward function that raises; None lets it raise.
    """
    errors: list[RewardError] = []
    token = _collection.set(_Collection(errors=errors, value_on_error=value_on_error))
    try:
        yield errors
    finally:
        _collection.reset(token)


def failed_reward(error: RewardError, *, env: str) -> RolloutFailed:
    """Return the error of a group whose reward function raised."""
    return RolloutFailed(
        f"reward function {error.function} of environment {env!r}: {error.kind}: {cut(error.message)}", kind=error.kind
    )


def require_finite(reward: float | None, *, env: str) -> float:
    """Return the reward of a scored rollout.

    Raises:
        RolloutFailed: it is no finite number.
    """
    if reward is None or not math.isfinite(reward):
        raise RolloutFailed(f"reward of environment {env!r} is {reward}, not a finite number", kind="RewardNotFinite")
    return float(reward)


def guard(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` such that what it raises is collected."""
    if hasattr(function, _GUARDED):
        return function

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            with _recorded(function):
                value = function(*args, **kwargs)
                return _await_guarded(function, value) if inspect.isawaitable(value) else _checked(value)
        except Exception:
            if (value := _value_on_error()) is None:
                raise
            return value

    setattr(guarded, _GUARDED, True)
    return guarded


async def _await_guarded(function: Callable[..., Any], value: Awaitable[Any]) -> Any:
    try:
        with _recorded(function):
            return _checked(await value)
    except Exception:
        if (instead := _value_on_error()) is None:
            raise
        return instead


def _value_on_error() -> float | None:
    """Return what counts for a function that raised; None when its error does."""
    collection = _collection.get()
    return None if collection is None else collection.value_on_error


def _checked(value: Any) -> Any:
    """Refuse None as a reward: verifiers would turn it into a TypeError that names nothing."""
    if value is None:
        raise TypeError("returned None, not a number")
    return value


@contextmanager
def _recorded(function: Callable[..., Any]) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit, KeyboardInterrupt) as exc:  # the last two would end the worker and every group in it
        if (collection := _collection.get()) is not None:
            name = getattr(function, "__name__", repr(function))
            collection.errors.append(RewardError(function=name, kind=type(exc).__name__, message=str(exc)))
        if isinstance(exc, Exception):
            raise
        raise RuntimeError(f"{type(exc).__name__}: {exc}") from exc
