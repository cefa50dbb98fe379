"""Compare every advantage with an oracle that follows its formula in exact fractions."""

from collections.abc import Callable
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
)

GROUPS = st.lists(
    st.tuples(st.floats(0, 4, allow_nan=False, allow_subnormal=False), st.integers(0, 5000)), min_size=2, max_size=17
)


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
    # Rewards are at most 4 and sums have at most 17 terms: a few units in the last place of 4 * 17.
    np.testing.assert_allclose(function(inputs_of(group)), [float(value) for value in expected], rtol=1e-12, atol=1e-13)


@given(group=GROUPS)
def test_standardised_rewards_are_centred_and_divided_by_the_sample_deviation(group: list[tuple[float, int]]) -> None:
    rewards = [Fraction(reward) for reward, _ in group]
    centred = oracle_mean(rewards, [])
    deviation = sqrt(sum((value * value for value in centred), Fraction()) / (len(rewards) - 1))
    expected = [float(value) / (deviation + 1e-3) if len(set(rewards)) > 1 else 0.0 for value in centred]
    np.testing.assert_allclose(standardised(inputs_of(group), eps=1e-3), expected, rtol=1e-9, atol=1e-12)


def test_equal_rewards_that_do_not_add_up_exactly_have_no_standardised_advantage() -> None:
    advantages = standardised(inputs_of([(0.1, 1)] * 3), eps=1e-30)
    assert np.ptp(np.array([0.1] * 3) - np.mean([0.1] * 3)) == 0.0
    np.testing.assert_array_equal(advantages, np.zeros(3))


def test_leave_one_out_is_a_multiple_of_the_default() -> None:
    inputs = inputs_of([(0.0, 1), (0.5, 1), (1.0, 1), (0.25, 1)])
    np.testing.assert_allclose(leave_one_out(inputs), mean_baseline(inputs) * 4 / 3, rtol=1e-15)


def test_a_rare_success_counts_more_by_the_mean() -> None:
    np.testing.assert_array_equal(mean_normalised(inputs_of([(1.0, 1)] + [(0.0, 1)] * 3)), [3.0, -1.0, -1.0, -1.0])
    with pytest.raises(ValueError, match="needs rewards >= 0, got -1"):
        mean_normalised(inputs_of([(-1.0, 1), (1.0, 1)]))


def test_raw_rewards_are_a_copy() -> None:
    inputs = inputs_of([(1.0, 1), (0.0, 1)])
    advantages = raw_rewards(inputs)
    np.testing.assert_array_equal(advantages, inputs.rewards)
    advantages[0] = 9.0
    assert inputs.rewards[0] == 1.0


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
    np.testing.assert_array_equal(AdvantageInputs.of(group).completion_lengths, [4, 10])
