"""Compare bootstrap intervals with the analytic ones of a mean."""

import numpy as np
import pytest

from trivet.algorithms.resampling import find_interval


def test_the_interval_of_a_mean_is_that_of_the_normal_distribution() -> None:
    values = np.random.default_rng(3).normal(2.0, 1.5, 500)
    half = 1.96 * values.std(ddof=1) / np.sqrt(500)
    expected = (values.mean() - half, values.mean() + half)
    assert find_interval(500, lambda counts: counts @ values / 500) == pytest.approx(expected, abs=0.08 * half)


def test_draws_of_clusters_keep_their_values_together() -> None:
    """Each unit has a value and its opposite, so every draw of whole units has a mean of exactly zero."""
    sums = np.array([[1.0, -1.0], [5.0, -5.0]])
    assert find_interval(2, lambda counts: (counts @ sums).sum()).tolist() == [0, 0]
