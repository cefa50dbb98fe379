"""Advantages, filters and seeds."""

import numpy as np
import pytest

from trivet.algorithms.advantages import ADVANTAGES
from trivet.algorithms.filters import FilterReason, filter_reason
from trivet.algorithms.seeds import derive_seed


def test_default_advantage_subtracts_the_groups_mean():
    rewards = np.array([1.0, 0.0, 0.5, 0.5])
    np.testing.assert_array_equal(ADVANTAGES["default"](rewards), [0.5, -0.5, 0.0, 0.0])


def test_no_advantage_function_is_the_reward_itself_and_a_copy():
    rewards = np.array([1.0, 0.0])
    advantages = ADVANTAGES["none"](rewards)
    np.testing.assert_array_equal(advantages, rewards)
    advantages[0] = 9.0
    assert rewards[0] == 1.0


@pytest.mark.parametrize(
    ("rewards", "num_loss_tokens", "is_on", "expected"),
    [
        ([1.0, 1.0], 10, True, FilterReason.ZERO_SIGNAL),
        ([1.0, 1.0], 10, False, None),
        ([1.0, 0.9], 10, True, None),
        ([1.0], 10, True, None),
        ([1.0, 0.0], 0, False, FilterReason.NO_LOSS_TOKENS),
        ([1.0, 1.0], 0, True, FilterReason.NO_LOSS_TOKENS),
    ],
)
def test_a_group_is_filtered_for_what_it_lacks(rewards, num_loss_tokens, is_on, expected):
    reason = filter_reason(np.array(rewards), num_loss_tokens=num_loss_tokens, online_difficulty_filtering=is_on)
    assert reason is expected


def test_seeds_are_stable_across_versions_and_differ_by_path():
    assert derive_seed(42, "rollout", 7, 0) == 8267952237148987860
    paths = [(seed, "rollout", group, index) for seed in range(3) for group in range(20) for index in range(8)]
    seeds = {derive_seed(*path) for path in paths}
    assert len(seeds) == len(paths)
    assert all(0 <= seed < 2**63 for seed in seeds)
