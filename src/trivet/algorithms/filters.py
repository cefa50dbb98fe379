"""Which finished groups carry no learning signal."""

from enum import StrEnum

import numpy as np


class FilterReason(StrEnum):
    ZERO_SIGNAL = "zero_signal"
    """Every rollout has the same reward, so every advantage is zero."""
    NO_LOSS_TOKENS = "no_loss_tokens"
    """Nothing in the group was sampled by the policy, or all of it was cut at seq_len."""


def filter_reason(rewards: np.ndarray, *, num_loss_tokens: int, online_difficulty_filtering: bool) -> FilterReason | None:
    """Why a group is not trained on, or None when it is.

    Args:
        rewards: float64 [rollouts].
        num_loss_tokens: over all rollouts of the group.
    """
    if num_loss_tokens == 0:
        return FilterReason.NO_LOSS_TOKENS
    if online_difficulty_filtering and len(rewards) > 1 and np.ptp(rewards) == 0.0:
        return FilterReason.ZERO_SIGNAL
    return None
