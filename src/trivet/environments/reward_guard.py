"""Keeps an error of a reward function from counting as a reward of 0, and a sys.exit in one from ending the process.

verifiers catches what a reward function raises, logs it and counts 0: the model would be trained on a bug. Each function is
wrapped in its rubric. The runner collects what was raised while it scores a group, and decides.
"""

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import verifiers as vf


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


def guard_rewards(env: vf.Environment) -> None:
    """Wrap every reward function of `env`, its sub-rubrics and sub-environments."""
    for rubric in _rubrics(env.rubric):
        rubric.funcs = [_guard(function) for function in rubric.funcs]


def _rubrics(rubric: vf.Rubric) -> Iterator[vf.Rubric]:
    yield rubric
    for inner in getattr(rubric, "rubrics", []):
        yield from _rubrics(inner)
    for env in getattr(rubric, "env_map", {}).values():
        yield from _rubrics(env.rubric)


def _guard(function: Callable[..., Any]) -> Callable[..., Any]:
    if hasattr(function, _GUARDED):
        return function

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        with _recorded(function):
            value = function(*args, **kwargs)
            if inspect.isawaitable(value):
                return _await_guarded(function, value)
            return _checked(value)

    setattr(guarded, _GUARDED, True)
    return guarded


async def _await_guarded(function: Callable[..., Any], value: Awaitable[Any]) -> Any:
    with _recorded(function):
        return _checked(await value)


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
