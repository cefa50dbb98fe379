"""Compare bootstrap intervals with the analytic ones of a mean."""

import numpy as np
import pytest

from trivet.algorithms.resampling import draw_statistics, find_interval


def test_the_interval_of_a_mean_is_that_of_the_normal_distribution() -> None:
    values = np.random.default_rng(3).normal(2.0, 1.5, 500)
    interval = find_interval(draw_statistics(500, lambda counts: counts @ values / 500))
    assert interval is not None
    half = 1.96 * values.std(ddof=1) / np.sqrt(500)
    assert interval == pytest.approx((values.mean() - half, values.mean() + half), abs=0.08 * half)


def test_draws_of_clusters_keep_their_values_together() -> None:
    """Each unit has a value and its opposite, so every draw of whole units has a mean of exactly zero."""
    sums = np.array([[1.0, -1.0], [5.0, -5.0]])
    draws = draw_statistics(2, lambda counts: (counts @ sums).sum(axis=1))
    assert np.abs(draws).max() == 0


def test_draws_do_not_depend_on_how_they_are_chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(7.0)
    whole = draw_statistics(7, lambda counts: counts @ values)
    monkeypatch.setattr("trivet.algorithms.resampling._MAX_COUNTS", 70)
    assert np.array_equal(draw_statistics(7, lambda counts: counts @ values), whole)


def test_a_statistic_without_values_in_most_draws_has_no_interval() -> None:
    assert find_interval(np.array([np.nan, np.nan, 1.0])) is None
