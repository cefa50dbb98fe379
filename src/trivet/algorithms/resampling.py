"""Computes confidence intervals by the bootstrap: units are drawn with replacement, and a statistic is computed from each draw.

A unit is what is independent of the others: an example, or a group of rollouts. A draw is given as counts, so a statistic that is
made of sums over units is a matrix product. Equal arguments give equal intervals.
"""

from collections.abc import Callable

import numpy as np

_NUM_DRAWS = 2000
"""With 2,000 draws a bound of a 95 % interval varies between seeds by about 3 % of its half-width."""


def find_interval(num_units: int, statistic: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return the lower and the upper bound of the 95 % interval of the statistic, [2, ...]. A draw with a NaN does not count.

    Args:
        num_units: at least 1.
        statistic: called with the count of each unit in a draw, int [num_units]; returns an array, or a number.

    Source: Efron 1979, Bootstrap methods; Field and Welsh 2007 for units that are clusters.
    """
    rng = np.random.default_rng(0)
    units = (rng.integers(num_units, size=num_units) for _ in range(_NUM_DRAWS))
    draws = np.array([statistic(np.bincount(drawn, minlength=num_units)) for drawn in units])
    return np.nanquantile(draws, [0.025, 0.975], axis=0)
