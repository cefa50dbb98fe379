"""Rounding does not decide whether computed numbers are equal, reach a limit, or make a whole."""

import numpy as np
import pytest

from trivet.algorithms.rounding import are_equal, is_at_least, round_down


@pytest.mark.parametrize("values", [[0.1 + 0.2, 0.3], [1e12 * 0.7, 7e11], [0.3 - 0.1 - 0.2, 0.0], [5.0]])
def test_numbers_that_differ_by_rounding_are_equal(values: list[float]) -> None:
    assert are_equal(np.array(values))


@pytest.mark.parametrize("values", [[0.5, 0.5 + 1e-9], [1e-9, 2e-9], [0.0, 1e-12], [np.nan, 1.0]])
def test_numbers_that_differ_by_more_are_not(values: list[float]) -> None:
    assert not are_equal(np.array(values))


def test_a_limit_is_reached_within_rounding() -> None:
    assert is_at_least(0.7 + 0.2 + 0.1, 1.0)
    assert is_at_least(-0.3 + 0.1 + 0.2, 0.0)
    assert not is_at_least(1.0 - 1e-9, 1.0)


@pytest.mark.parametrize(("value", "expected"), [(100 * 1.15, 115), (100 * 0.29, 29), (114.9, 114), (0.0, 0), (3.0, 3)])
def test_a_product_that_rounding_made_a_little_less_is_whole(value: float, expected: int) -> None:
    assert round_down(value) == expected
