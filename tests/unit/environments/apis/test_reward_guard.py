"""Exceptions of reward functions are collected wherever in an environment they are raised."""

import asyncio
import sys

import pytest
import verifiers as vf
from datasets import Dataset

from support.scripted_model import ScriptedModel
from trivet.environments.apis.reward_guard import collect_reward_errors
from trivet.environments.apis.v0.rubrics import guard_rewards


def make_env(*functions) -> vf.Environment:
    dataset = Dataset.from_list([{"question": "abc", "answer": "cba"}])
    return vf.SingleTurnEnv(dataset=dataset, rubric=vf.Rubric(funcs=list(functions)))


def score(env: vf.Environment, *, num_rollouts: int = 2) -> tuple[list[float], list[tuple[str, str, str]]]:
    """Return the rewards and, for each error, its function, kind and message."""
    route = {"env_id": env.env_names[0]} if isinstance(env, vf.EnvGroup) else {}

    client = ScriptedModel(lambda prompt: "unused")

    async def run():
        row = {**env.get_dataset()[0], "info": route}
        states = [await env.init_state(row, client, "m", {}) for _ in range(num_rollouts)]
        for state in states:
            state["completion"] = [{"role": "assistant", "content": "cba"}]
        with collect_reward_errors() as errors:
            await env.rubric.score_group(states)
        return [state["reward"] for state in states], [(error.function, error.kind, error.message) for error in errors]

    guard_rewards(env)
    guard_rewards(env)  # a second time changes nothing
    return asyncio.run(run())


def fine(**kwargs) -> float:
    return 1.0


def broken(completion, **kwargs) -> float:
    raise ValueError("no such answer")


async def broken_later(completion, **kwargs) -> float:
    await asyncio.sleep(0)
    raise LookupError("nothing there")


def leaving(completion, **kwargs) -> float:
    sys.exit(3)


async def silent(completion, **kwargs) -> float:
    return None  # type: ignore[return-value]


def broken_group(completions, **kwargs) -> list[float]:
    raise ValueError("no such group")


def by_rank(completions, **kwargs) -> list[float]:
    return [float(index) for index in range(len(completions))]


def test_what_works_is_untouched():
    assert score(make_env(fine, by_rank)) == ([1.0, 2.0], [])


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (broken, "ValueError", "no such answer"),
        (broken_later, "LookupError", "nothing there"),
        (leaving, "SystemExit", "3"),
        (silent, "TypeError", "returned None, not a number"),
    ],
)
def test_an_error_is_collected_once_for_each_rollout(function, kind, message):
    rewards, errors = score(make_env(fine, function))
    assert errors == [(function.__name__, kind, message)] * 2
    assert rewards == [1.0, 1.0]  # verifiers' own 0 for what raised


def test_a_function_that_scores_a_whole_group_is_guarded_too():
    assert score(make_env(broken_group))[1] == [("broken_group", "ValueError", "no such group")]


def test_rubrics_inside_rubrics_and_environments_inside_environments_are_guarded():
    inner = make_env(fine)
    inner.add_rubric(vf.Rubric(funcs=[broken]))
    group = vf.EnvGroup(envs=[inner, make_env(fine)], env_names=["first", "second"])
    assert score(group)[1] == [("broken", "ValueError", "no such answer")] * 2
