"""Learning-rate schedules as pure functions of the step: a factor on the configured learning rate."""

import math


def warmup_factor(step: int, *, warmup_steps: int) -> float:
    """Linear from 1/warmup_steps at step 1 to 1 at `warmup_steps`."""
    return min(step / warmup_steps, 1.0) if warmup_steps else 1.0


def constant_factor(step: int) -> float:
    return 1.0


def linear_factor(step: int, *, max_steps: int, warmup_steps: int, decay_steps: int, min_factor: float) -> float:
    """Warm-up, a plateau, then a linear fall to `min_factor` over the last `decay_steps` of `max_steps`.

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
    """Warm-up, then half a cosine from 1 to `min_factor` at `max_steps`."""
    if step <= warmup_steps:
        return warmup_factor(step, warmup_steps=warmup_steps)
    progress = min((step - warmup_steps) / max(max_steps - warmup_steps, 1), 1.0)
    return min_factor + (1.0 - min_factor) * 0.5 * (1.0 + math.cos(math.pi * progress))
