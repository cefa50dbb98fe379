from functools import partial

import pytest

from trivet.algorithms.schedules import (
    cosine_factor,
    cosine_value,
    linear_factor,
    linear_value,
    warmup_factor,
)

LINEAR = partial(linear_factor, max_steps=20, warmup_steps=4, decay_steps=10, min_factor=0.1)
COSINE = partial(cosine_factor, max_steps=20, warmup_steps=4, min_factor=0.1)


def test_warmup_reaches_the_peak_at_its_last_step_and_the_first_step_is_not_zero():
    assert [warmup_factor(step, warmup_steps=4) for step in range(1, 6)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert warmup_factor(1, warmup_steps=0) == 1.0


def test_linear_is_a_ramp_a_plateau_and_a_fall_to_the_minimum():
    assert [LINEAR(step) for step in (2, 4, 10)] == [0.5, 1.0, 1.0]
    assert LINEAR(11) == pytest.approx(0.91)
    assert LINEAR(15) == pytest.approx(0.55)
    assert LINEAR(20) == LINEAR(25) == pytest.approx(0.1)


def test_cosine_is_a_ramp_and_half_a_cosine():
    assert [COSINE(step) for step in (2, 4)] == [0.5, 1.0]
    assert COSINE(12) == pytest.approx(0.55)
    assert COSINE(20) == COSINE(25) == pytest.approx(0.1)


@pytest.mark.parametrize("schedule", [LINEAR, COSINE])
def test_after_the_warmup_the_rate_never_rises_and_stays_between_minimum_and_peak(schedule):
    factors = [schedule(step) for step in range(4, 30)]
    assert factors == sorted(factors, reverse=True)
    assert all(0.1 - 1e-12 <= factor <= 1.0 for factor in factors)


def test_degenerate_lengths_do_not_divide_by_zero():
    assert linear_factor(5, max_steps=5, warmup_steps=0, decay_steps=0, min_factor=0.0) == 1.0
    assert cosine_factor(5, max_steps=5, warmup_steps=5, min_factor=0.0) == 1.0
    assert cosine_factor(6, max_steps=5, warmup_steps=5, min_factor=0.0) == pytest.approx(0.0)


def test_values_go_from_their_start_at_step_one_to_their_end():
    assert [linear_value(step, start=2.0, end=1.0, num_steps=5) for step in (1, 3, 5, 9)] == [2.0, 1.5, 1.0, 1.0]
    assert [cosine_value(step, start=2.0, end=1.0, num_steps=5) for step in (1, 3, 5, 9)] == pytest.approx([2.0, 1.5, 1.0, 1.0])
    assert cosine_value(2, start=2.0, end=1.0, num_steps=5) > linear_value(2, start=2.0, end=1.0, num_steps=5)
    assert linear_value(1, start=2.0, end=1.0, num_steps=1) == 1.0
