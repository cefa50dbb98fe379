"""Advantages of a group's rollouts from their rewards.

Computed on the complete group, before any filter, so that what is filtered never moves a baseline.
"""

from collections.abc import Callable

import numpy as np

AdvantageFunction = Callable[[np.ndarray], np.ndarray]


def mean_baseline(rewards: np.ndarray) -> np.ndarray:
    """A_i = R_i - mean(R), without division by the standard deviation.

    Args:
        rewards: float64 [rollouts] of one group.

    Source: Dr. GRPO (arXiv 2503.20783), section 3; the default of prime-rl.
    """
    return rewards - rewards.mean()


def raw_rewards(rewards: np.ndarray) -> np.ndarray:
    """A_i = R_i: no baseline. For rewards that are already centred, or groups of one."""
    return rewards.copy()


ADVANTAGES: dict[str, AdvantageFunction] = {"default": mean_baseline, "none": raw_rewards}
"""By the value of `orchestrator.advantage.type`."""
