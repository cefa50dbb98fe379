"""Guards and runs the rubrics of an environment, in the form of each release that has the v0 API."""

import contextlib
import inspect
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import verifiers as vf

from trivet.environments.apis.messages import describe
from trivet.environments.apis.reward_guard import (
    Scores,
    collect_reward_errors,
    failed_reward,
    guard,
    measured,
    require_reward,
)
from trivet.errors import RolloutFailed


def guard_rewards(env: vf.Environment) -> None:
    """Wrap every reward function of `env`, its sub-rubrics and sub-environments."""
    for rubric in _rubrics(env.rubric):
        functions, weights = (
            ("funcs", "weights") if hasattr(rubric, "funcs") else ("reward_funcs", "reward_weights")
        )  # until 0.1.7
        scores_group = getattr(rubric, "_is_group_func", lambda function: False)  # since 0.1.8
        guarded = [
            guard(function, scores=Scores.GROUP if scores_group(function) else Scores.ONE, is_metric=weight == 0)
            for function, weight in zip(getattr(rubric, functions), getattr(rubric, weights), strict=False)
        ]
        setattr(rubric, functions, guarded)


def _rubrics(rubric: vf.Rubric) -> Iterator[vf.Rubric]:
    yield rubric
    for inner in getattr(rubric, "rubrics", []):
        yield from _rubrics(inner)
    for env in getattr(rubric, "env_map", {}).values():
        yield from _rubrics(env.rubric)


async def score_group(env: vf.Environment, states: Sequence[Any], *, name: str, drops_errors: bool) -> float:
    """Score the rollouts of a group together: write `reward` and `metrics` into each state. Return the seconds it took.

    Args:
        drops_errors: a reward function that raises or returns no reward fails the group; otherwise verifiers counts 0.

    Raises:
        RolloutFailed: the rubric raised, or a reward function did.
    """
    started = time.monotonic()
    with collect_reward_errors(num_rollouts=len(states)) as errors:
        try:
            await _score(env, list(states))
        except Exception as exc:  # the user's code
            raise RolloutFailed(f"scoring failed: {describe(exc)}", kind=type(exc).__name__) from exc
        finally:
            if hasattr(env.rubric, "cleanup"):  # since 0.1.12
                for state in states:
                    await env.rubric.cleanup(state)
    if errors and drops_errors:
        raise failed_reward(errors[0], env=name)
    return time.monotonic() - started


def read_scores(state: Mapping[str, Any], *, name: str) -> tuple[float, dict[str, float]]:
    """Return the reward of a scored state, and the value of each reward function and metric by its name.

    Raises:
        RolloutFailed: the reward is no number that can be trained on.
    """
    metrics: dict[str, Any] = state.get("metrics") or {}
    return require_reward(state.get("reward"), env=name, values=metrics), measured(metrics)


async def _score(env: vf.Environment, states: list[Any]) -> None:
    rubric: Any = env.rubric
    parameters = inspect.signature(rubric.score_rollouts).parameters if hasattr(rubric, "score_rollouts") else {}
    if not getattr(env, "score_rollouts", True):
        await rubric.dummy_score_group(states)
    elif "prompts" in parameters:  # until 0.1.7 the scores are returned, and lists of fields are handed in
        names = ("prompt", "completion", "answer", "state", "task", "info", "example_id")
        rows = [{**state, "state": state} for state in states]
        lists = {f"{each}s": [row.get(each) for row in rows] for each in names}
        scored = await rubric.score_rollouts(**{each: values for each, values in lists.items() if each in parameters})
        for index, state in enumerate(states):
            state["reward"] = scored.reward[index]
            state["metrics"] = {each: values[index] for each, values in scored.metrics.items()}
    elif "score_sem" in inspect.signature(rubric.score_group).parameters:  # 0.1.8 and 0.1.9
        await rubric.score_group(states, score_sem=contextlib.nullcontext())
    else:
        await rubric.score_group(states)
