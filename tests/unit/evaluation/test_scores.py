"""Compare averages, chances and their intervals with formulas written out."""

from itertools import combinations

import pytest

from trivet.evaluation.scores import mean_over_examples, pass_at, pass_probability


def test_the_interval_of_a_mean_is_over_examples():
    found = mean_over_examples([0.5, 0.0, 0.5])
    assert found.value == pytest.approx(1 / 3)
    assert found.ci95 == pytest.approx(1.959964 * (((0.5 - 1 / 3) ** 2 * 2 + (1 / 3) ** 2) / 2) ** 0.5 / 3**0.5)


def test_one_example_has_no_interval():
    assert mean_over_examples([0.25]).ci95 is None


@pytest.mark.parametrize("num_passed", range(6))
@pytest.mark.parametrize("j", [1, 2, 5])
def test_the_chance_of_a_pass_is_that_of_every_choice_of_rollouts(num_passed, j):
    rollouts = [True] * num_passed + [False] * (5 - num_passed)
    choices = list(combinations(rollouts, j))
    assert pass_probability(5, num_passed, j=j) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_pass_is_given_for_powers_of_two_and_for_all_rollouts():
    found = pass_at([[1.0, 0.0, 0.0], [0.0, 0.99, 0.0]])
    assert list(found) == ["1", "2", "3"]
    assert found["1"].value == pytest.approx(1 / 6)
    assert found["3"].value == pytest.approx(1 / 2)
