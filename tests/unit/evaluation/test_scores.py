import pytest

from trivet.evaluation.scores import average


def test_average_is_over_examples_and_pass_needs_one_full_reward():
    avg, half, passed = average([[1.0, 0.0], [0.0, 0.0], [0.5, 0.5]])
    assert avg == pytest.approx(1 / 3)
    assert passed == pytest.approx(1 / 3)
    assert half == pytest.approx(1.959964 * (((0.5 - 1 / 3) ** 2 * 2 + (1 / 3) ** 2) / 2) ** 0.5 / 3**0.5)


def test_one_example_has_no_interval_and_none_has_no_score():
    assert average([[0.25]]) == (0.25, None, 0.0)
    assert average([]) == (None, None, None)
