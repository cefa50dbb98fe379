"""Compare every advantage with an oracle that follows its formula in exact fractions."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.groups import make_group, make_sample
from trivet.algorithms.advantages import (
    AdvantageInputs,
    leave_one_out,
    length_weighted_mean,
    mean_baseline,
    mean_normalised,
    raw_rewards,
    standardised,
    standardised_components,
)

REWARDS = st.just(0.0) | st.floats(1e-9, 4)
GROUPS = st.lists(st.tuples(REWARDS, st.integers(0, 5000)), min_size=2, max_size=17)
WITH_BASELINE = [
    mean_baseline,
    length_weighted_mean,
    leave_one_out,
    mean_normalised,
    partial(standardised, eps=1e-6),
    partial(standardised, eps=1e-30),
]


def inputs_of(group: list[tuple[float, int]]) -> AdvantageInputs:
    rewards, lengths = zip(*group, strict=True)
    return AdvantageInputs(rewards=np.array(rewards), completion_lengths=np.array(lengths))


def mean(values: list[Fraction]) -> Fraction:
    return sum(values, Fraction()) / len(values)


def oracle_mean(rewards: list[Fraction], lengths: list[int]) -> list[Fraction]:
    return [reward - mean(rewards) for reward in rewards]


def oracle_length_weighted(rewards: list[Fraction], lengths: list[int]) -> list[Fraction]:
    if sum(lengths) == 0:
        return oracle_mean(rewards, lengths)
    baseline = sum((r * length for r, length in zip(rewards, lengths, strict=True)), Fraction()) / sum(lengths)
    return [reward - baseline for reward in rewards]


def oracle_leave_one_out(rewards: list[Fraction], lengths: list[int]) -> list[Fraction]:
    return [reward - mean(rewards[:i] + rewards[i + 1 :]) for i, reward in enumerate(rewards)]


def oracle_max_rl(rewards: list[Fraction], lengths: list[int]) -> list[Fraction]:
    return [(reward - mean(rewards)) / mean(rewards) if mean(rewards) else Fraction() for reward in rewards]


@pytest.mark.parametrize(
    ("function", "oracle"),
    [
        (mean_baseline, oracle_mean),
        (length_weighted_mean, oracle_length_weighted),
        (leave_one_out, oracle_leave_one_out),
        (mean_normalised, oracle_max_rl),
    ],
)
@given(group=GROUPS)
def test_it_is_its_formula(
    function: Callable[[AdvantageInputs], np.ndarray],
    oracle: Callable[[list[Fraction], list[int]], list[Fraction]],
    group: list[tuple[float, int]],
) -> None:
    expected = oracle([Fraction(reward) for reward, _ in group], [length for _, length in group])
    # Rewards are at most 4; what is a trillionth of that above or below the baseline is rounding, and counts as 0.
    np.testing.assert_allclose(function(inputs_of(group)), [float(value) for value in expected], rtol=1e-11, atol=1e-11)


@given(group=GROUPS)
def test_standardised_rewards_are_centred_and_divided_by_the_sample_deviation(group: list[tuple[float, int]]) -> None:
    rewards = [Fraction(reward) for reward, _ in group]
    centred = oracle_mean(rewards, [])
    deviation = sqrt(sum((value * value for value in centred), Fraction()) / (len(rewards) - 1))
    expected = [float(value) / (deviation + 1e-3) for value in centred]
    np.testing.assert_allclose(standardised(inputs_of(group), eps=1e-3), expected, rtol=1e-9, atol=1e-8)


SCORES = st.lists(st.tuples(st.floats(-4, 4), st.floats(-1e-2, 1e-2)), min_size=2, max_size=9)


def with_scores(scores: list[tuple[float, float]]) -> AdvantageInputs:
    correct, form = np.array(scores).T
    return replace(inputs_of([(0.0, 1)] * len(scores)), scores={"correct": correct, "format": form, "unused": correct * np.nan})


@given(scores=SCORES)
def test_components_are_standardised_before_they_are_added(scores: list[tuple[float, float]]) -> None:
    expected = [0.0] * len(scores)
    for position, weight in enumerate((2.0, -0.5)):
        column = [Fraction(row[position]) for row in scores]
        centred = oracle_mean(column, [])
        deviation = sqrt(sum((value * value for value in centred), Fraction()) / (len(column) - 1))
        for index, value in enumerate(centred):
            expected[index] += weight * float(value) / (deviation + 1e-3)
    found = standardised_components(with_scores(scores), components={"correct": 2.0, "format": -0.5}, eps=1e-3)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-8)


def test_components_tell_rollouts_of_equal_sums_apart() -> None:
    inputs = with_scores([(1.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 0.0)])
    found = standardised_components(inputs, components={"correct": 1.0, "format": 0.5}, eps=1e-9)
    np.testing.assert_allclose(
        found, [0.25, -0.75, 0.25, 0.25], atol=1e-8
    )  # 1/4 and 3/4 over a deviation of 1/2, times 1 - 1/2


@pytest.mark.parametrize("name", ["missing", "unused"])
def test_a_component_that_is_not_a_score_of_every_rollout_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"component '{name}' is not a score of every rollout; these are: correct, format"):
        standardised_components(with_scores([(1, 0), (0, 0)]), components={"correct": 1.0, name: 1.0}, eps=1e-3)


def test_scores_of_a_group_are_columns_and_those_of_truncated_rollouts_can_count_as_0() -> None:
    group = make_group(0)
    group.rollouts[0].scores = {"a": 2.0}
    group.rollouts[1].scores = {"a": 3.0, "b": 1.0}
    group.rollouts[1].samples[0].is_truncated = True
    scores = AdvantageInputs.from_group(group).scores
    np.testing.assert_array_equal(scores["a"], [2.0, 3.0])
    np.testing.assert_array_equal(scores["b"], [np.nan, 1.0])
    np.testing.assert_array_equal(AdvantageInputs.from_group(group, zeroes_truncated=True).scores["a"], [2.0, 0.0])


@pytest.mark.parametrize("function", WITH_BASELINE)
@given(reward=st.floats(0, 1e12), lengths=st.lists(st.integers(0, 5000), min_size=2, max_size=64))
def test_equal_rewards_have_an_advantage_of_exactly_0(
    function: Callable[[AdvantageInputs], np.ndarray], reward: float, lengths: list[int]
) -> None:
    np.testing.assert_array_equal(function(inputs_of([(reward, length) for length in lengths])), np.zeros(len(lengths)))


@pytest.mark.parametrize("function", WITH_BASELINE)
@pytest.mark.parametrize(
    "rewards", [[0.7] * 6, [0.1] * 3, [0.7 + 0.2 + 0.1, 1.0, 0.1 * 10], [0.1 + 0.2, 0.3], [abs(0.3 - 0.1 - 0.2), 0.0]]
)
def test_rewards_that_differ_by_rounding_alone_have_an_advantage_of_exactly_0(
    function: Callable[[AdvantageInputs], np.ndarray], rewards: list[float]
) -> None:
    advantages = function(inputs_of([(reward, 3 + index) for index, reward in enumerate(rewards)]))
    np.testing.assert_array_equal(advantages, np.zeros(len(rewards)))


def test_a_reward_that_is_the_mean_of_its_group_has_an_advantage_of_exactly_0() -> None:
    assert np.mean([0.6, 0.7, 0.8]) != 0.7
    for function in (mean_baseline, leave_one_out, partial(standardised, eps=1e-6)):
        assert function(inputs_of([(0.6, 1), (0.7, 1), (0.8, 1)]))[1] == 0.0


def test_a_rare_success_counts_more_by_the_mean() -> None:
    np.testing.assert_array_equal(mean_normalised(inputs_of([(1.0, 1)] + [(0.0, 1)] * 3)), [3.0, -1.0, -1.0, -1.0])
    with pytest.raises(ValueError, match="needs rewards >= 0, got -1"):
        mean_normalised(inputs_of([(-1.0, 1), (1.0, 1)]))


@pytest.mark.parametrize(
    "function",
    [mean_baseline, length_weighted_mean, leave_one_out, mean_normalised, raw_rewards, partial(standardised, eps=1e-6)],
)
@given(group=GROUPS, data=st.data())
def test_it_does_not_depend_on_the_order_of_rollouts(
    function: Callable[[AdvantageInputs], np.ndarray], group: list[tuple[float, int]], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(group))))
    moved = function(inputs_of([group[index] for index in order]))
    np.testing.assert_allclose(moved, function(inputs_of(group))[list(order)], rtol=1e-9, atol=1e-9)


def test_lengths_are_the_tokens_that_the_policy_sampled() -> None:
    group = make_group(0)
    group.rollouts[1].samples.append(make_sample(completion=6))
    np.testing.assert_array_equal(AdvantageInputs.from_group(group).completion_lengths, [4, 10])
