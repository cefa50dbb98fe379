"""Keeps an error of a reward function from counting as a reward of 0, and a sys.exit in one from ending the process.

verifiers' v0 API catches what a reward function raises, logs it and counts 0: the model would be trained on a bug. Its v1 API fails
the whole episode, and lets a sys.exit end the process. Each adapter wraps every reward function; whoever scores a group collects
what was raised, and decides.
"""

import functools
import inspect
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


_errors: ContextVar[list[RewardError] | None] = ContextVar("reward_errors", default=None)

_GUARDED = "__trivet_guarded__"


@contextmanager
def collect_reward_errors() -> Iterator[list[RewardError]]:
    """Collect what reward functions raise inside the `with`, in tasks started there too."""
    errors: list[RewardError] = []
    token = _errors.set(errors)
    try:
        yield errors
    finally:
        _errors.reset(token)


def failed_reward(error: RewardError, *, env: str) -> RolloutFailed:
    """Return the error of a group whose reward function raised."""
    return RolloutFailed(
        f"reward function {error.function} of environment {env!r}: {error.kind}: {cut(error.message)}", kind=error.kind
    )


def guard(function: Callable[..., Any], *, value_on_error: float | None = None) -> Callable[..., Any]:
    """Return `function` such that what it raises is collected.

    Args:
        value_on_error: is returned instead of raising; None raises.
    """
    if hasattr(function, _GUARDED):
        return function

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            with _recorded(function):
                value = function(*args, **kwargs)
                if inspect.isawaitable(value):
                    return _await_guarded(function, value, value_on_error)
                return _checked(value)
        except Exception:
            if value_on_error is None:
                raise
            return value_on_error

    setattr(guarded, _GUARDED, True)
    return guarded


async def _await_guarded(function: Callable[..., Any], value: Awaitable[Any], value_on_error: float | None) -> Any:
    try:
        with _recorded(function):
            return _checked(await value)
    except Exception:
        if value_on_error is None:
            raise
        return value_on_error


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
        errors = _errors.get()
        if errors is not None:
            name = getattr(function, "__name__", repr(function))
            errors.append(RewardError(function=name, kind=type(exc).__name__, message=str(exc)))
        if isinstance(exc, Exception):
            raise
        raise RuntimeError(f"{type(exc).__name__}: {exc}") from exc
