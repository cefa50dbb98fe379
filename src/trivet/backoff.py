"""Computes the exponential backoff between retries. Pure: it holds no state and does not sleep."""

import math

_MAX_DOUBLINGS = 30
"""Keeps the power finite if retries go on for days. 2^30 times a first pause of 1 s is 34 years, so no real pause is limited."""


def backoff_s(retry: int, *, first_s: float, min_s: float = 0.0, max_s: float = math.inf) -> float:
    """Return the pause before a retry, in seconds. It doubles with each retry: first_s, 2 * first_s, 4 * first_s, ….

    Args:
        retry: counted from 1.
        first_s: pause before the first retry, before it is limited.
        min_s: shortest pause, at most `max_s`.
        max_s: longest pause; infinite where `retry` itself is limited.
    """
    return min(max(first_s * 2.0 ** min(retry - 1, _MAX_DOUBLINGS), min_s), max_s)
