"""Rounding decides nothing, schedules go from their start to their end, and seeds are stable."""

from functools import partial

import numpy as np
import pytest

from trivet.algorithms.arithmetic import are_equal, derive_seed, is_at_least, round_down
from trivet.algorithms.schedules import cosine_factor, cosine_value, linear_factor, linear_value

LINEAR = partial(linear_factor, max_steps=20, warmup_steps=4, decay_steps=10, min_factor=0.1)
COSINE = partial(cosine_factor, max_steps=20, warmup_steps=4, min_factor=0.1)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        *(([0.1 + 0.2, 0.3], True), ([1e12 * 0.7, 7e11], True), ([0.3 - 0.1 - 0.2, 0.0], True), ([5.0], True)),
        *(([0.5, 0.5 + 1e-9], False), ([1e-9, 2e-9], False), ([0.0, 1e-12], False), ([np.nan, 1.0], False)),
    ],
)
def test_numbers_that_differ_by_rounding_alone_are_equal(values: list[float], expected: bool) -> None:
    assert are_equal(np.array(values)) is expected


def test_a_limit_is_reached_within_rounding() -> None:
    assert is_at_least(0.7 + 0.2 + 0.1, 1.0)
    assert is_at_least(-0.3 + 0.1 + 0.2, 0.0)
    assert not is_at_least(1.0 - 1e-9, 1.0)


@pytest.mark.parametrize(("value", "expected"), [(100 * 1.15, 115), (100 * 0.29, 29), (114.9, 114), (0.0, 0), (3.0, 3)])
def test_a_product_that_rounding_made_a_little_less_is_whole(value: float, expected: int) -> None:
    assert round_down(value) == expected


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (LINEAR, {1: 0.25, 2: 0.5, 4: 1.0, 10: 1.0, 11: 0.91, 15: 0.55, 20: 0.1, 25: 0.1}),
        (COSINE, {1: 0.25, 2: 0.5, 4: 1.0, 12: 0.55, 20: 0.1, 25: 0.1}),
    ],
)
def test_a_rate_warms_up_and_falls_to_its_minimum_without_rising_again(schedule, expected: dict[int, float]) -> None:
    assert [schedule(step) for step in expected] == pytest.approx(list(expected.values()))
    factors = [schedule(step) for step in range(4, 30)]
    assert factors == sorted(factors, reverse=True)


def test_degenerate_lengths_do_not_divide_by_zero() -> None:
    assert linear_factor(5, max_steps=5, warmup_steps=0, decay_steps=0, min_factor=0.0) == 1.0
    assert cosine_factor(5, max_steps=5, warmup_steps=5, min_factor=0.0) == 1.0
    assert cosine_factor(6, max_steps=5, warmup_steps=5, min_factor=0.0) == pytest.approx(0.0)
    assert linear_value(1, start=2.0, end=1.0, num_steps=1) == 1.0


def test_values_go_from_their_start_at_step_one_to_their_end() -> None:
    assert [linear_value(step, start=2.0, end=1.0, num_steps=5) for step in (1, 3, 5, 9)] == [2.0, 1.5, 1.0, 1.0]
    assert [cosine_value(step, start=2.0, end=1.0, num_steps=5) for step in (1, 3, 5, 9)] == pytest.approx([2.0, 1.5, 1.0, 1.0])
    assert cosine_value(2, start=2.0, end=1.0, num_steps=5) > linear_value(2, start=2.0, end=1.0, num_steps=5)


def test_seeds_are_stable_across_versions_and_differ_by_path() -> None:
    assert derive_seed(42, "rollout", 7, 0) == 8267952237148987860
    paths = [(seed, "rollout", group, index) for seed in range(3) for group in range(20) for index in range(8)]
    seeds = {derive_seed(*path) for path in paths}
    assert len(seeds) == len(paths)
    assert all(0 <= seed < 2**63 for seed in seeds)
