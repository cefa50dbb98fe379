import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.groups import make_group
from trivet.algorithms.advantages import AdvantageInputs
from trivet.config.schema.orchestrator import AdvantageConfig
from trivet.errors import BatchError, ConfigError
from trivet.orchestrator.advantage import make_advantage

INPUTS = AdvantageInputs(
    rewards=np.array([1.0, 0.0, 0.0, 0.0]),
    completion_lengths=np.array([3, 1, 1, 1]),
    scores={"correct": np.array([1.0, 0.0, 0.0, 0.0])},
)

MODULE = """
import numpy as np

def scaled(inputs, *, factor=1.0):
    return (inputs.rewards - np.median(inputs.rewards)) * factor

def as_list(inputs):
    return [0.0] * len(inputs.rewards)

def divides(inputs):
    with np.errstate(all="ignore"):
        return inputs.rewards / inputs.rewards.sum()

def scaled_up(inputs):
    return (inputs.rewards - inputs.rewards.mean()) * 1e30

def one_number(inputs):
    return 1.0

def by_turn(inputs):
    assert inputs.scores["any"].shape == inputs.rewards.shape
    assert "any" in inputs.scores and inputs.scores.get("any").shape == inputs.rewards.shape
    return inputs.per_token([rewards - 0.5 for rewards in inputs.turn_rewards])

def by_token(inputs):
    return [np.arange(len(ids)) / 8 for ids in inputs.token_ids]

def one_per_turn(inputs):
    return [np.zeros(len(lengths)) for lengths in inputs.turn_lengths]

def few_arrays(inputs):
    return by_token(inputs)[1:]

def large_at_a_token(inputs):
    return [values * 1e30 for values in by_token(inputs)]

def picky(inputs):
    if len(inputs.rewards) == 3:
        raise ZeroDivisionError("three of them")
    return inputs.rewards
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_advantages.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_advantages", raising=False)
    return "my_advantages"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (AdvantageConfig(), [0.75, -0.25, -0.25, -0.25]),
        (AdvantageConfig(length_weighted_mean=True), [0.5, -0.5, -0.5, -0.5]),
        (AdvantageConfig(type="length_weighted_mean"), [0.5, -0.5, -0.5, -0.5]),
        (AdvantageConfig(type="rloo"), [1.0, -1 / 3, -1 / 3, -1 / 3]),
        (AdvantageConfig(type="std_norm", eps=0.5), [0.75, -0.25, -0.25, -0.25]),
        (AdvantageConfig(type="max_rl"), [3.0, -1.0, -1.0, -1.0]),
        (AdvantageConfig(type="gdpo", components={"correct": 2.0}, eps=0.5), [1.5, -0.5, -0.5, -0.5]),
        (AdvantageConfig(type="none"), [1.0, 0.0, 0.0, 0.0]),
    ],
)
def test_every_type_has_its_function(config: AdvantageConfig, expected: list[float]) -> None:
    np.testing.assert_allclose(make_advantage(config)(INPUTS), expected, rtol=1e-15)


def test_a_function_of_ones_own_gets_its_arguments(module: str) -> None:
    config = AdvantageConfig(type="custom", import_path=f"{module}.scaled", kwargs={"factor": 2.0})
    np.testing.assert_array_equal(make_advantage(config)(INPUTS), [2.0, 0.0, 0.0, 0.0])
    listed = make_advantage(AdvantageConfig(type="custom", import_path=f"{module}:as_list"))(INPUTS)
    assert isinstance(listed, np.ndarray)
    assert listed.dtype == np.float64


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere.f", "cannot be imported .ModuleNotFoundError"),
        ("my_advantages.missing", "cannot be imported .AttributeError"),
        ("scaled", 'must be "module.function"'),
        ("my_advantages.one_number", "returned shape .*one advantage per rollout"),
        ("my_advantages.scaled_up", r"returned \[.*e\+29.*\], must be finite and at most 1e\+15 in size"),
        ("my_advantages.divides", r"rewards \[0.0, 0.0\].*must be finite"),
        ("my_advantages.np", "failed .TypeError"),
        ("my_advantages.one_per_turn", r"returned shape \(2,\) for rollout 0, must be \(3,\): .*inputs.per_token"),
        ("my_advantages.few_arrays", "returned 3 arrays, must be 4: one per rollout"),
        ("my_advantages.large_at_a_token", "returned 1.25e.29 for rollout 0, must be finite"),
    ],
)
def test_a_function_that_cannot_work_is_refused_before_the_run(module: str, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        make_advantage(AdvantageConfig(type="custom", import_path=name))
    assert f'orchestrator.advantage.import_path "{name}"' in str(caught.value)


def test_a_function_may_return_an_advantage_for_each_token_or_turn(module: str) -> None:
    group = make_group(0, (0.0, 1.0))
    for rollout in group.rollouts:
        rollout.turn_rewards = [rollout.reward]
    inputs = AdvantageInputs.from_group(group)
    inputs = replace(inputs, scores={"any": inputs.rewards})
    by_turn = make_advantage(AdvantageConfig(type="custom", import_path=f"{module}.by_turn"))(inputs)
    assert [values.tolist() for values in by_turn] == [[-0.5] * 4, [0.5] * 4]
    by_token = make_advantage(AdvantageConfig(type="custom", import_path=f"{module}.by_token"))(inputs)
    assert [values.tolist() for values in by_token] == [[0.0, 0.125, 0.25, 0.375]] * 2


@pytest.mark.parametrize("name", ["turns", "agents"])
def test_turns_and_agents_have_their_functions(name: str) -> None:
    group = make_group(0, (0.0, 1.0))
    for rollout in group.rollouts:
        rollout.turn_rewards = [0.0]
    found = make_advantage(AdvantageConfig.model_validate({"type": name}))(AdvantageInputs.from_group(group))
    assert [values.tolist() for values in found] == [[-0.5] * 4, [0.5] * 4]


def test_an_error_during_the_run_ends_it_with_the_rewards(module: str) -> None:
    advantage = make_advantage(AdvantageConfig(type="custom", import_path=f"{module}.picky"))
    three = AdvantageInputs(rewards=np.array([1.0, 0.0, 0.5]), completion_lengths=np.array([1, 1, 1]))
    with pytest.raises(BatchError, match=r"picky\" of rewards \[1.0, 0.0, 0.5\] failed: three of them"):
        advantage(three)
    negative = AdvantageInputs(rewards=np.array([-1.0, 0.0]), completion_lengths=np.array([1, 1]))
    with pytest.raises(BatchError, match=r'advantage "max_rl" of rewards .* needs rewards >= 0'):
        make_advantage(AdvantageConfig(type="max_rl"))(negative)
