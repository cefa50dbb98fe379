from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.algorithms.difficulty import Difficulty, WeightedRoundRobin, has_passed, rate_difficulty


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (1.0, Difficulty.EASY),
        (0.8, Difficulty.EASY),
        (0.79, Difficulty.NORMAL),
        (0.2, Difficulty.HARD),
        (-1.0, Difficulty.HARD),
    ],
)
def test_both_thresholds_belong_to_the_pool_that_they_bound(reward: float, expected: Difficulty) -> None:
    assert rate_difficulty(reward, easy_threshold=0.8, hard_threshold=0.2) is expected


def test_a_mean_that_rounding_has_moved_off_a_threshold_is_in_its_pool() -> None:
    below, above = float(np.mean([0.1] * 6)), float(np.mean([0.7] * 6))
    assert below < 0.1
    assert above > 0.7
    assert rate_difficulty(below, easy_threshold=0.1, hard_threshold=None) is Difficulty.EASY
    assert rate_difficulty(above, easy_threshold=None, hard_threshold=0.7) is Difficulty.HARD
    assert rate_difficulty(above, easy_threshold=None, hard_threshold=None) is Difficulty.NORMAL


def test_a_weighted_sum_of_full_marks_has_passed() -> None:
    assert 0.7 + 0.2 + 0.1 < 1.0
    assert has_passed(0.7 + 0.2 + 0.1)
    assert not has_passed(0.999999)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_turns_keep_their_proportions_at_every_moment(ratios: list[float]) -> None:
    names = [str(index) for index in range(len(ratios))]
    turns = WeightedRoundRobin(dict(zip(names, ratios, strict=True)))
    taken: Counter[str] = Counter()
    for count in range(1, 120):
        taken[turns.choose(names)] += 1
        for name, ratio in zip(names, ratios, strict=True):
            # The name with the most credit has at least the mean, above 0: none falls to -1, and they add up to 0.
            assert abs(taken[name] - count * ratio / sum(ratios)) < len(names)


def test_a_name_that_sat_out_does_not_catch_up() -> None:
    turns = WeightedRoundRobin({"a": 1, "b": 1})
    assert [turns.choose(["a"]) for _ in range(50)] == ["a"] * 50
    assert Counter(turns.choose(["a", "b"]) for _ in range(10)) == {"a": 5, "b": 5}


@given(st.lists(st.sampled_from(["ab", "a", "b", "abc"]), min_size=1, max_size=40), st.integers(0, 40))
def test_turns_go_on_from_their_credits(history: list[str], cut: int) -> None:
    ratios = {"a": 0.3, "b": 2.0, "c": 1.0}
    unbroken = WeightedRoundRobin(ratios)
    expected = [unbroken.choose(names) for names in history]
    first = WeightedRoundRobin(ratios)
    taken = [first.choose(names) for names in history[:cut]]
    second = WeightedRoundRobin(ratios, credits=dict(first.credits))
    assert taken + [second.choose(names) for names in history[cut:]] == expected
