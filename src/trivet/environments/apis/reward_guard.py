"""Keeps what is no reward from counting as one: an error, or a value that is no number that can be trained on.

verifiers' v0 API catches what a reward function raises, or what float() raises of its value, logs it and counts 0: the model would
be trained on a bug. Its v1 API fails the whole episode, and lets a sys.exit end the process. Each adapter wraps every reward
function; whoever scores a group collects what was raised, and decides.
"""

import functools
import inspect
import logging
import math
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
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


class Scores(StrEnum):
    """The form in which a reward function returns its numbers."""

    ONE = "one"
    """The number of one rollout."""
    NAMED = "named"
    """The number of one rollout, or several by name."""
    GROUP = "group"
    """A number for each rollout of a group."""


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
    num_rollouts: int | None


class RewardNotFinite(ValueError):
    """Raised for a reward that is NaN or infinite."""


class RewardTooLarge(ValueError):
    """Raised for a reward beyond `MAX_REWARD`."""


_collection: ContextVar[_Collection | None] = ContextVar("reward_errors", default=None)

_GUARDED = "__trivet_guarded__"


@contextmanager
def collect_reward_errors(
    *, value_on_error: float | None = None, num_rollouts: int | None = None
) -> Iterator[list[RewardError]]:
    """Collect what reward functions raise inside the `with`, in tasks started there too.

    Args:
        value_on_error: is returned by a reward function that raises; None lets it raise.
        num_rollouts: that are scored together.
    """
    errors: list[RewardError] = []
    token = _collection.set(_Collection(errors=errors, value_on_error=value_on_error, num_rollouts=num_rollouts))
    try:
        yield errors
    finally:
        _collection.reset(token)


def failed_reward(error: RewardError, *, env: str) -> RolloutFailed:
    """Return the error of a group whose reward function raised."""
    return RolloutFailed(
        f"reward function {error.function} of environment {env!r}: {error.kind}: {cut(error.message)}", kind=error.kind
    )


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
    read = _MetricReader(name) if is_metric else _as_reward

    def checked(value: Any) -> Any:
        """Return the numbers that `function` returned, or raise what is wrong with them."""
        try:
            return _read_all(value, scores, read)
        except (TypeError, ValueError) as exc:
            raise type(exc)(f"returned {exc}") from None

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            with _recorded(name):
                value = function(*args, **kwargs)
                return _await_guarded(value, name=name, checked=checked) if inspect.isawaitable(value) else checked(value)
        except Exception:
            if (value := _value_on_error()) is None:
                raise
            return value

    setattr(guarded, _GUARDED, True)
    return guarded


async def _await_guarded(value: Awaitable[Any], *, name: str, checked: Callable[[Any], Any]) -> Any:
    try:
        with _recorded(name):
            return checked(await value)
    except Exception:
        if (instead := _value_on_error()) is None:
            raise
        return instead


def _value_on_error() -> float | None:
    """Return what counts for a function that raised; None when its error does."""
    collection = _collection.get()
    return None if collection is None else collection.value_on_error


@dataclass(slots=True)
class _MetricReader:
    """Reads the values of one metric. A value that is no finite number is left out; the first is reported."""

    name: str
    has_reported: bool = False

    def __call__(self, value: Any) -> float:
        """Return the number, or `_UNMEASURED`."""
        try:
            return _as_finite(value)
        except (TypeError, ValueError) as exc:
            if not self.has_reported:
                logger.warning("metric %s returned %s: such a value is left out, and no reward depends on it", self.name, exc)
            self.has_reported = True
            return _UNMEASURED


def _read_all(value: Any, scores: Scores, read: Callable[[Any], float]) -> Any:
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
    """Return `value` as a number that can be trained on; the message of an error is the end of a sentence."""
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


@contextmanager
def _recorded(name: str) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit, KeyboardInterrupt) as exc:  # the last two would end the worker and every group in it
        if (collection := _collection.get()) is not None:
            collection.errors.append(RewardError(function=name, kind=type(exc).__name__, message=str(exc)))
        if isinstance(exc, Exception):
            raise
        raise RuntimeError(f"{type(exc).__name__}: {exc}") from exc
