"""Computes with single numbers: comparisons that rounding does not decide, schedules, and seeds. Pure.

0.7 + 0.2 + 0.1 is 0.9999999999999999, and the mean of six times 0.7 is 0.7000000000000001: to `==` and `>=` they are not 1 and 0.7.
A schedule is a function of the step: a factor on the learning rate, or a value from a start to an end.
"""

import hashlib
import math

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


def warmup_factor(step: int, *, warmup_steps: int) -> float:
    """Rise linearly from 1/warmup_steps at step 1 to 1 at `warmup_steps`."""
    return min(step / warmup_steps, 1.0) if warmup_steps else 1.0


def linear_factor(step: int, *, max_steps: int, warmup_steps: int, decay_steps: int, min_factor: float) -> float:
    """Warm up, stay at 1, then fall linearly to `min_factor` over the last `decay_steps` of `max_steps`.

    Args:
        step: the optimizer step about to be taken, from 1.
    """
    if step <= warmup_steps:
        return warmup_factor(step, warmup_steps=warmup_steps)
    left = max(max_steps - step, 0)
    if left >= decay_steps:
        return 1.0
    return min_factor + (1.0 - min_factor) * left / decay_steps


def cosine_factor(step: int, *, max_steps: int, warmup_steps: int, min_factor: float) -> float:
    """Warm up, then follow half a cosine from 1 to `min_factor` at `max_steps`."""
    if step <= warmup_steps:
        return warmup_factor(step, warmup_steps=warmup_steps)
    progress = min((step - warmup_steps) / max(max_steps - warmup_steps, 1), 1.0)
    return min_factor + (1.0 - min_factor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def linear_value(step: int, *, start: float, end: float, num_steps: int) -> float:
    """Go straight from `start` at step 1 to `end` at `num_steps`, and stay."""
    return start + (end - start) * _done(step, num_steps)


def cosine_value(step: int, *, start: float, end: float, num_steps: int) -> float:
    """Follow half a cosine from `start` at step 1 to `end` at `num_steps`, and stay."""
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * _done(step, num_steps)))


def _done(step: int, num_steps: int) -> float:
    """Return the share of the way done at `step`, from 0 at step 1 to 1 at `num_steps`; 1 if there is one step only."""
    return 1.0 if num_steps <= 1 else min(max((step - 1) / (num_steps - 1), 0.0), 1.0)


def derive_seed(seed: int, *parts: int | str) -> int:
    """Return a 63-bit seed that is a function of the run's seed and a path such as ("rollout", group_id, index)."""
    text = "/".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
