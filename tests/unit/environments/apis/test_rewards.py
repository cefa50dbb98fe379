"""What reward functions raise, and what they return that is no reward, is collected wherever in an environment it happens."""

import asyncio
import sys
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
import verifiers as vf
from datasets import Dataset

from support.scripted_model import ScriptedModel
from trivet.environments.apis.rewards import add_score, collect_reward_errors
from trivet.environments.apis.v0.score import guard_rewards, read_scores, score_group
from trivet.errors import RolloutFailed


def make_env(*functions) -> vf.Environment:
    dataset = Dataset.from_list([{"question": "abc", "answer": "cba"}])
    return vf.SingleTurnEnv(dataset=dataset, rubric=vf.Rubric(funcs=list(functions)))


def score(env: vf.Environment) -> tuple[list[float], list[tuple[str, str, str]]]:
    """Return the rewards and, for each error, its function, kind and message."""
    route = {"env_id": env.env_names[0]} if isinstance(env, vf.EnvGroup) else {}

    client = ScriptedModel(lambda prompt: "unused")

    async def run():
        row = {**env.get_dataset()[0], "info": route}
        states = [await env.init_state(row, client, "m", {}) for _ in range(2)]
        for state in states:
            state["completion"] = [{"role": "assistant", "content": "cba"}]
        with collect_reward_errors("toy", num_rollouts=2) as errors:
            await env.rubric.score_group(states)
        said = [str(error).removeprefix("reward function ").split(f" of environment 'toy': {error.kind}: ") for error in errors]
        return [state["reward"] for state in states], [
            (name, error.kind, message) for error, (name, message) in zip(errors, said, strict=True)
        ]

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


TRUE, HALF = [1.0, 1.0], [0.5, 0.5]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((value, TRUE) for value in (True, 1, np.bool_(True), np.int64(1), np.array(1.0), torch.tensor(True))),
        *((value, HALF) for value in (np.float32(0.5), np.array([0.5]), torch.tensor([0.5]), Decimal("0.5"), Fraction(1, 2))),
        (torch.tensor(0.5, requires_grad=True, dtype=torch.bfloat16), HALF),
    ],
)
def test_every_kind_of_number_is_a_reward(value, expected):
    assert score(make_env(lambda completion: value)) == (expected, [])


@pytest.mark.parametrize(
    ("value", "kind", "shown"),
    [
        ([0.5], "TypeError", "the list [0.5], not a number"),
        ({"score": 0.5}, "TypeError", "the dict {'score': 0.5}, not a number"),
        ("0.5", "TypeError", "the str '0.5', not a number"),
        (1j, "TypeError", "the complex 1j, not a number"),
        (np.array([0.5, 0.5]), "TypeError", "the ndarray array([0.5, 0.5]), not a number"),
        (float("nan"), "RewardNotFinite", "the float nan, not a finite number"),
        (torch.tensor(float("nan")), "RewardNotFinite", "the Tensor tensor(nan), not a finite number"),
        (10**400, "RewardNotFinite", "the int 1000"),
        (1e20, "RewardTooLarge", "the float 1e+20, too large to train on: it must lie between -1e+12 and 1e+12"),
    ],
)
def test_what_is_no_reward_is_an_error_that_names_function_type_and_value(value, kind, shown):
    def worth(completion):
        return value

    async def worth_later(completion):
        return value

    for function in (worth, worth_later):
        _, errors = score(make_env(fine, function))
        assert [(name, found) for name, found, _ in errors] == [(function.__name__, kind)] * 2
        assert errors[0][2].startswith(f"returned {shown}")


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([1.0], "the list [1.0], of length 1 for the 2 rollouts of the group"),
        (1.0, "the float 1.0, not a list of 2 numbers, one for each rollout of the group"),
        ({0: 1.0, 1: 1.0}, "the dict {0: 1.0, 1: 1.0}, not a list of 2 numbers"),
        ([[1.0], [1.0]], "the list [1.0], not a number"),
        ("11", "the str '11', not a list"),
        (np.array([0.0, np.inf]), "the float inf, not a finite number"),
    ],
)
def test_a_function_that_scores_a_group_returns_a_number_for_each_rollout(values, shown):
    def ranked(completions):
        return values

    _, [(name, _, message)] = score(make_env(ranked))
    assert name == "ranked"
    assert message.startswith(f"returned {shown}")


@pytest.mark.parametrize("values", [(0.0, 1.0), np.arange(2), torch.arange(2.0), [np.float32(0), torch.tensor([1])]])
def test_a_function_that_scores_a_group_may_return_a_list_array_or_tensor(values):
    assert score(make_env(lambda completions: values)) == ([0.0, 1.0], [])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, [1.0], "high"])
def test_a_metric_without_a_value_costs_that_metric_and_no_reward(value, caplog):
    def odd(completion, state):
        return value if state["number"] == 1 else 3.0

    def odd_group(completions):
        return [value, 3.0]

    env = make_env(fine)
    env.rubric.add_metric(odd)
    env.rubric.add_metric(odd_group)
    guard_rewards(env)
    client = ScriptedModel(lambda prompt: "unused")

    async def run():
        states = [await env.init_state(env.get_dataset()[0], client, "m", {}) for _ in range(2)]
        for number, state in enumerate(states):
            state["completion"], state["number"] = [{"role": "assistant", "content": "cba"}], number
        await score_group(env, states, name="toy", drops_errors=True)
        return [read_scores(state, name="toy") for state in states]

    (first, first_scores), (second, second_scores) = asyncio.run(run())
    assert (first, second) == (1.0, 1.0)
    assert first_scores == {"fine": 1.0, "odd": 3.0, "num_turns": 0.0}
    assert second_scores == {"fine": 1.0, "odd_group": 3.0, "num_turns": 0.0}
    assert "metric odd returned" in caplog.text
    assert "metric odd_group returned" in caplog.text


def test_a_reward_that_a_rubric_of_its_own_makes_is_read_with_the_same_care():
    for reward, said in [([1.0], r"is the list \[1.0\], not a number"), (1e39, "too large to train on")]:
        with pytest.raises(
            RolloutFailed, match=rf"the reward of environment 'toy' .*{said}.*; its reward functions: size = 1e\+39"
        ):
            read_scores({"reward": reward, "metrics": {"size": 1e39}}, name="toy")


def test_a_score_of_trivet_replaces_none_of_the_environment():
    scores = {"correct": 1.0}
    add_score(scores, "broken_prefixes", 2, env="toy")
    assert scores == {"correct": 1.0, "broken_prefixes": 2.0}
    with pytest.raises(RolloutFailed, match="'toy' has a reward function or metric called 'broken_prefixes'"):
        add_score(scores, "broken_prefixes", 3, env="toy")
