"""Keeps what is no reward from counting as one: an error, or a value that is no number that can be trained on.

verifiers' v0 API catches what a reward function raises, or what float() raises of its value, logs it and counts 0: the model would
be trained on a bug. Its v1 API fails the whole episode, and lets a sys.exit end the process. Each adapter wraps every reward
function with `guard`; whoever scores a group collects what was raised, and decides.
"""

import functools
import inspect
import logging
import math
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from trivet.environments.apis.messages import cut
from trivet.errors import RolloutFailed
from trivet.wire.rollouts import MAX_REWARD

logger = logging.getLogger(__name__)

_MAX_VALUE_CHARS = 200
"""A returned value is shown up to this length."""
_UNMEASURED = -sys.float_info.max
"""Stands for a metric without a value until `measured` leaves it out. It is finite, so with a weight of 0 it adds 0 to a reward."""
_GUARDED = "__trivet_guarded__"


class Scores(StrEnum):
    """The form in which a reward function returns its numbers."""

    ONE = "one"
    """The number of one rollout."""
    NAMED = "named"
    """The number of one rollout, or several by name."""
    GROUP = "group"
    """A number for each rollout of a group."""


class RewardNotFinite(ValueError):
    """Raised for a reward that is NaN or infinite."""


class RewardTooLarge(ValueError):
    """Raised for a reward beyond `MAX_REWARD`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Collection:
    env: str
    value_on_error: float | None
    num_rollouts: int | None
    errors: list[RolloutFailed] = field(default_factory=list)


_collection: ContextVar[_Collection | None] = ContextVar("reward_errors", default=None)


@contextmanager
def collect_reward_errors(
    env: str, *, value_on_error: float | None = None, num_rollouts: int | None = None
) -> Iterator[list[RolloutFailed]]:
    """Collect what reward functions of an environment raise inside the `with`, in tasks started there too.

    Args:
        value_on_error: is returned by a reward function that raises; None lets it raise.
        num_rollouts: that are scored together.
    """
    collection = _Collection(env=env, value_on_error=value_on_error, num_rollouts=num_rollouts)
    token = _collection.set(collection)
    try:
        yield collection.errors
    finally:
        _collection.reset(token)


def guard(
    function: Callable[..., Any], *, scores: Scores = Scores.ONE, is_metric: bool = False, name: str = ""
) -> Callable[..., Any]:
    """Return `function` such that it returns numbers, and what it raises is collected.

    Args:
        is_metric: its weight is 0. A value that is no finite number then costs that metric, and nothing is raised for it.
        name: shown in errors; the function's own when empty.
    """
    if hasattr(function, _GUARDED):
        return function
    name = name or getattr(function, "__name__", repr(function))
    read = _metric_reader(name) if is_metric else _as_reward

    def checked(value: Any) -> Any:
        try:
            return _read_all(value, scores, read)
        except (TypeError, ValueError) as exc:
            raise type(exc)(f"returned {exc}") from None

    async def finish(value: Awaitable[Any]) -> Any:
        try:
            return checked(await value)
        except (Exception, SystemExit, KeyboardInterrupt) as exc:  # noqa: BLE001  the user's code
            return _collect(name, exc)

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            value = function(*args, **kwargs)
            return finish(value) if inspect.isawaitable(value) else checked(value)
        except (Exception, SystemExit, KeyboardInterrupt) as exc:  # noqa: BLE001  the user's code
            return _collect(name, exc)

    setattr(guarded, _GUARDED, True)
    return guarded


def _collect(name: str, error: BaseException) -> float:
    """Collect what a reward function raised. Return the value that counts instead, or raise where there is none."""
    collection = _collection.get()
    if collection is not None:
        kind = type(error).__name__
        message = f"reward function {name} of environment {collection.env!r}: {kind}: {cut(str(error))}"
        collection.errors.append(RolloutFailed(message, kind=kind))
        if collection.value_on_error is not None:
            return collection.value_on_error
    if isinstance(error, Exception):
        raise error
    raise RuntimeError(f"{type(error).__name__}: {error}") from error  # else it would end the worker and every group in it


def require_reward(reward: Any, *, env: str, values: Mapping[str, float | None]) -> float:
    """Return the reward of a scored rollout.

    Args:
        values: of the reward functions and metrics, by name, for the message.

    Raises:
        RolloutFailed: it is no number that can be trained on.
    """
    try:
        return _as_reward(reward)
    except (TypeError, ValueError) as exc:
        shown = ", ".join(
            f"{name} = {value:.6g}" for name, value in values.items() if value is not None and value != _UNMEASURED
        )
        scored = f"; its reward functions: {cut(shown, _MAX_VALUE_CHARS)}" if shown else ""
        raise RolloutFailed(f"the reward of environment {env!r} is {exc}{scored}", kind=type(exc).__name__) from exc


def measured(values: Mapping[str, float | None]) -> dict[str, float]:
    """Return the values of reward functions and metrics that have one."""
    return {name: float(value) for name, value in values.items() if value is not None and _UNMEASURED < value < math.inf}


def _metric_reader(name: str) -> Callable[[Any], float]:
    """Return what reads the values of one metric. A value that is no finite number is left out; the first is reported."""
    has_reported = False

    def read(value: Any) -> float:
        nonlocal has_reported
        try:
            return _as_finite(value)
        except (TypeError, ValueError) as exc:
            if not has_reported:
                logger.warning("metric %s returned %s: such a value is left out, and no reward depends on it", name, exc)
            has_reported = True
            return _UNMEASURED

    return read


def _read_all(value: Any, scores: Scores, read: Callable[[Any], float]) -> Any:
    """Return the numbers in what a reward function returned; the message of an error is the end of a sentence."""
    if scores is Scores.NAMED and isinstance(value, Mapping):
        return {key: read(inner) for key, inner in value.items()}
    if scores is not Scores.GROUP:
        return read(value)
    values = value.tolist() if hasattr(value, "tolist") else value
    collection = _collection.get()
    num_rollouts = None if collection is None else collection.num_rollouts
    wanted = "" if num_rollouts is None else f"{num_rollouts} "
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise TypeError(f"{_shown(value)}, not a list of {wanted}numbers, one for each rollout of the group")
    if num_rollouts is not None and len(values) != num_rollouts:
        raise ValueError(f"{_shown(value)}, of length {len(values)} for the {wanted}rollouts of the group")
    return [read(inner) for inner in values]


def _as_reward(value: Any) -> float:
    number = _as_finite(value)
    if abs(number) > MAX_REWARD:
        raise RewardTooLarge(
            f"{_shown(value)}, too large to train on: it must lie between {-MAX_REWARD:g} and {MAX_REWARD:g}; bound or rescale it"
        )
    return number


def _as_finite(value: Any) -> float:
    """Return `value` as a float: any real number, a bool, or an array or tensor of one element; no text, and no container."""
    element = value.item() if hasattr(value, "item") and math.prod(getattr(value, "shape", (0,))) == 1 else value
    if isinstance(element, str | bytes) or not hasattr(element, "__float__"):
        raise TypeError(f"{_shown(value)}, not a number")
    try:
        number = float(element)
    except OverflowError:  # an int beyond the range of float64
        number = math.inf
    except (TypeError, ValueError, RuntimeError):  # an array of several elements, and what only looks like a number
        raise TypeError(f"{_shown(value)}, not a number") from None
    if not math.isfinite(number):
        raise RewardNotFinite(f"{_shown(value)}, not a finite number")
    return number


def _shown(value: Any) -> str:
    return "None" if value is None else f"the {type(value).__name__} {cut(repr(value), _MAX_VALUE_CHARS)}"
