"""Pure functions of the step: a factor of the learning rate, or a value that goes from a start to an end.

The configuration imports this file, so it must not import numpy.
"""

import math


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
    num_left = max(max_steps - step, 0)
    if num_left >= decay_steps:
        return 1.0
    return min_factor + (1.0 - min_factor) * num_left / decay_steps


def cosine_factor(step: int, *, max_steps: int, warmup_steps: int, min_factor: float) -> float:
    """Warm up, then follow half a cosine from 1 to `min_factor` at `max_steps`."""
    if step <= warmup_steps:
        return warmup_factor(step, warmup_steps=warmup_steps)
    progress = min((step - warmup_steps) / max(max_steps - warmup_steps, 1), 1.0)
    return min_factor + (1.0 - min_factor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def linear_value(step: int, *, start: float, end: float, num_steps: int) -> float:
    """Go linearly from `start` at step 1 to `end` at `num_steps`, and stay there."""
    return start + (end - start) * _progress(step, num_steps)


def cosine_value(step: int, *, start: float, end: float, num_steps: int) -> float:
    """Follow half a cosine from `start` at step 1 to `end` at `num_steps`, and stay there."""
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * _progress(step, num_steps)))


def _progress(step: int, num_steps: int) -> float:
    """Return the progress of a schedule at `step`, from 0 at step 1 to 1 at `num_steps`; 1 if there is one step only."""
    return 1.0 if num_steps <= 1 else min(max((step - 1) / (num_steps - 1), 0.0), 1.0)
