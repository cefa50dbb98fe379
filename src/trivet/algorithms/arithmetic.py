"""Computes with single numbers: comparisons that rounding does not decide, and seeds. Pure.

0.7 + 0.2 + 0.1 is 0.9999999999999999, and the mean of six times 0.7 is 0.7000000000000001: to `==` and `>=` they are not 1 and 0.7.
"""

import hashlib

import numpy as np

_RELATIVE = 1e-12
"""Sums of hundreds of float64 terms are wrong by less than this share of their largest; no reward means a difference as small."""
_ABSOLUTE = 1e-15
"""What terms of about 1 leave over when they cancel: 0.3 - 0.1 - 0.2 is -3e-17. Rewards below it count as 0."""


def rounding_error(values: np.ndarray | float) -> float:
    """Return the greatest difference that rounding alone may make between numbers of the size of `values`."""
    return max(_RELATIVE * float(np.max(np.abs(values))), _ABSOLUTE)


def are_equal(values: np.ndarray) -> bool:
    """Return whether `values`, at least one, differ by no more than rounding."""
    return bool(np.ptp(values) <= rounding_error(values))


def is_at_least(value: float, limit: float) -> bool:
    """Return whether `value` is `limit` or more; a little less counts where rounding can have made it so."""
    return value >= limit - rounding_error(limit)


def round_down(value: float) -> int:
    """Return the whole part of a product such as 100 * 1.15, which is 114.99999999999999 as a float and 115 here."""
    return int(value + rounding_error(value))


def derive_seed(seed: int, *parts: int | str) -> int:
    """Return a 63-bit seed that is a function of the run's seed and a path such as ("rollout", group_id, index)."""
    text = "/".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
