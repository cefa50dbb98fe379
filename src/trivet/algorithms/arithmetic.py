"""Pure functions of numbers: comparisons that allow for rounding, and seeds.

As floats, 0.7 + 0.2 + 0.1 is 0.9999999999999999, and the mean of six times 0.7 is 0.7000000000000001, so `==` and `>=` give wrong
answers.
"""

import hashlib

import numpy as np

_RELATIVE_ERROR = 1e-12
"""Largest rounding error, as a share of the largest value: of a sum of hundreds of float64 it is smaller. Real differences of
rewards are larger."""
_ABSOLUTE_ERROR = 1e-15
"""Largest rounding error that remains when values of about 1 cancel: 0.3 - 0.1 - 0.2 is -3e-17. Smaller rewards count as 0."""


def rounding_error(values: np.ndarray | float) -> float:
    """Return the largest difference that rounding alone can cause between numbers of the size of `values`."""
    return max(_RELATIVE_ERROR * float(np.max(np.abs(values))), _ABSOLUTE_ERROR)


def are_equal(values: np.ndarray) -> bool:
    """Return whether `values`, at least one, differ by no more than rounding."""
    return bool(np.ptp(values) <= rounding_error(values))


def is_at_least(value: float, limit: float) -> bool:
    """Return whether `value` is at least `limit`, or below it only by rounding."""
    return value >= limit - rounding_error(limit)


def round_down(value: float) -> int:
    """Return the whole part of a product such as 100 * 1.15, which is 114.99999999999999 as a float and 115 here."""
    return int(value + rounding_error(value))


def derive_seed(seed: int, *parts: int | str) -> int:
    """Return a 63-bit seed that is a function of the run's seed and a path such as ("rollout", group_id, index)."""
    text = "/".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
