"""Checks the values and errors of reward functions, so that nothing counts as a reward that is not a finite number.

If a reward function raises, or returns a value that is no number, verifiers' v0 API logs the error and counts 0: the model would be
trained on a bug. Its v1 API makes the whole episode fail, and does not catch sys.exit, which ends the process. So each adapter
(`apis.v0`, `apis.v1`) wraps every reward function with `guard`, and scores a group inside `collect_reward_errors`. Then it decides
by the collected errors whether the group fails.
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
"""The most characters of a returned value that a message shows."""
_UNMEASURED = -sys.float_info.max
"""The value of a metric that has none, until `drop_unmeasured` removes it. It is finite, so with a weight of 0 it adds 0 to a
reward."""
_GUARDED_MARK = "__trivet_guarded__"
"""The attribute of a function that `guard` has wrapped."""


class ScoreForm(StrEnum):
    """The form in which a reward function returns its numbers."""

    ONE = "one"
    """The number of one rollout."""
    NAMED = "named"
    """The number of one rollout, or several by name."""
    GROUP = "group"
    """A number for each rollout of a group."""
    PARTIAL_GROUP = "partial_group"
    """A number for each rollout of a group, or None for a rollout to which the function does not apply."""


class RewardNotFinite(ValueError):
    """Raised for a reward that is NaN or infinite."""


class RewardTooLarge(ValueError):
    """Raised for a reward beyond `MAX_REWARD`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Collection:
    """The arguments of `collect_reward_errors`, and the errors that it has collected."""

    env: str
    value_on_error: float | None
    num_rollouts: int | None
    errors: list[RolloutFailed] = field(default_factory=list)


_collection: ContextVar[_Collection | None] = ContextVar("reward_errors", default=None)
"""The collection of the current task; None outside of `collect_reward_errors`."""


@contextmanager
def collect_reward_errors(
    env: str, *, value_on_error: float | None = None, num_rollouts: int | None = None
) -> Iterator[list[RolloutFailed]]:
    """Collect the errors of an environment's reward functions in the `with` block, also in tasks that it starts.

    Args:
        env: the environment's name, for messages.
        value_on_error: the value that counts if a reward function raises; None: it still raises.
        num_rollouts: the number of rollouts that are scored together; None: unknown.
    """
    collection = _Collection(env=env, value_on_error=value_on_error, num_rollouts=num_rollouts)
    token = _collection.set(collection)
    try:
        yield collection.errors
    finally:
        _collection.reset(token)


def guard(
    function: Callable[..., Any], *, scores: ScoreForm = ScoreForm.ONE, is_metric: bool = False, name: str = ""
) -> Callable[..., Any]:
    """Wrap a reward function: its values are checked and converted to floats, and its errors are collected.

    Args:
        scores: the form of its values.
        is_metric: its weight is 0. A value that is no finite number is then left out, without an error.
        name: shown in errors; empty: the function's own name.
    """
    if hasattr(function, _GUARDED_MARK):
        return function
    name = name or getattr(function, "__name__", repr(function))
    read = _metric_reader(name) if is_metric else _as_reward

    def check(value: Any) -> Any:
        try:
            return _read_all(value, scores, read)
        except (TypeError, ValueError) as exc:
            raise type(exc)(f"returned {exc}") from None

    async def await_and_check(value: Awaitable[Any]) -> Any:
        try:
            return check(await value)
        except (Exception, SystemExit, KeyboardInterrupt) as exc:  # noqa: BLE001  user code may raise anything
            return _handle_error(name, exc)

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            value = function(*args, **kwargs)
            return await_and_check(value) if inspect.isawaitable(value) else check(value)
        except (Exception, SystemExit, KeyboardInterrupt) as exc:  # noqa: BLE001  user code may raise anything
            return _handle_error(name, exc)

    setattr(guarded, _GUARDED_MARK, True)
    return guarded


def _handle_error(name: str, error: BaseException) -> float:
    """Collect an error of a reward function. Return the collection's `value_on_error`; if it is None, raise the error."""
    collection = _collection.get()
    if collection is not None:
        kind = type(error).__name__
        message = f"reward function {name} of environment {collection.env!r}: {kind}: {cut(str(error))}"
        collection.errors.append(RolloutFailed(message, kind=kind))
        if collection.value_on_error is not None:
            return collection.value_on_error
    if isinstance(error, Exception):
        raise error
    # A SystemExit or KeyboardInterrupt would end the worker and every group in it.
    raise RuntimeError(f"{type(error).__name__}: {error}") from error


def require_reward(reward: Any, *, env: str, values: Mapping[str, float | None]) -> float:
    """Return the reward of a scored rollout as a float.

    Args:
        values: the values of the reward functions and metrics by name, for the message.

    Raises:
        RolloutFailed: the reward is no finite number, or its size exceeds `MAX_REWARD`.
    """
    try:
        return _as_reward(reward)
    except (TypeError, ValueError) as exc:
        shown = ", ".join(
            f"{name} = {value:.6g}" for name, value in values.items() if value is not None and value != _UNMEASURED
        )
        scored = f"; its reward functions: {cut(shown, _MAX_VALUE_CHARS)}" if shown else ""
        raise RolloutFailed(f"the reward of environment {env!r} is {exc}{scored}", kind=type(exc).__name__) from exc


def drop_unmeasured(values: Mapping[str, float | None]) -> dict[str, float]:
    """Return the values of reward functions and metrics, without those that are missing or not finite."""
    return {name: float(value) for name, value in values.items() if value is not None and _UNMEASURED < value < math.inf}


def add_score(scores: dict[str, float], name: str, value: float, *, env: str) -> None:
    """Add a score that is no reward function or metric of the environment `env`.

    Raises:
        RolloutFailed: the environment has a score of that name.
    """
    if name in scores:
        problem = f"environment {env!r} has a reward function or metric called {name!r}, which is a score of trivet's own"
        raise RolloutFailed(f"{problem}; give it another name", kind="ReservedScore")
    scores[name] = float(value)


def _metric_reader(name: str) -> Callable[[Any], float]:
    """Return a function that converts the values of one metric. It marks a value that is no finite number as unmeasured.

    Only the first such value is reported.
    """
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


def _read_all(value: Any, scores: ScoreForm, read: Callable[[Any], float]) -> Any:
    """Convert each number in a reward function's value with `read`. The message of an error is the end of a sentence."""
    if scores is ScoreForm.NAMED and isinstance(value, Mapping):
        return {key: read(inner) for key, inner in value.items()}
    if scores not in (ScoreForm.GROUP, ScoreForm.PARTIAL_GROUP):
        return read(value)
    values = value.tolist() if hasattr(value, "tolist") else value
    collection = _collection.get()
    num_rollouts = None if collection is None else collection.num_rollouts
    count = "" if num_rollouts is None else f"{num_rollouts} "
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise TypeError(f"{_describe_value(value)}, not a list of {count}numbers, one for each rollout of the group")
    if num_rollouts is not None and len(values) != num_rollouts:
        raise ValueError(f"{_describe_value(value)}, of length {len(values)} for the {count}rollouts of the group")
    return [None if inner is None and scores is ScoreForm.PARTIAL_GROUP else read(inner) for inner in values]


def _as_reward(value: Any) -> float:
    number = _as_finite(value)
    if abs(number) > MAX_REWARD:
        raise RewardTooLarge(
            f"{_describe_value(value)}, too large to train on: it must lie between {-MAX_REWARD:g} and {MAX_REWARD:g}; "
            "bound or rescale it"
        )
    return number


def _as_finite(value: Any) -> float:
    """Return `value` as a float. It may be a real number, a bool, or an array or tensor of one element, but no text.

    Raises:
        TypeError: it is no number.
        RewardNotFinite: it is NaN or infinite.
    """
    element = value.item() if hasattr(value, "item") and math.prod(getattr(value, "shape", (0,))) == 1 else value
    if isinstance(element, str | bytes) or not hasattr(element, "__float__"):
        raise TypeError(f"{_describe_value(value)}, not a number")
    try:
        number = float(element)
    except OverflowError:  # an int beyond the range of float64
        number = math.inf
    except (TypeError, ValueError, RuntimeError):  # for example an array of several elements
        raise TypeError(f"{_describe_value(value)}, not a number") from None
    if not math.isfinite(number):
        raise RewardNotFinite(f"{_describe_value(value)}, not a finite number")
    return number


def _describe_value(value: Any) -> str:
    return "None" if value is None else f"the {type(value).__name__} {cut(repr(value), _MAX_VALUE_CHARS)}"
