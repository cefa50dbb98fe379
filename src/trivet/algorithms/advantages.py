"""Computes the advantages of a group's rollouts from their rewards.

Computed on the complete group, before any filter, so that what is filtered never moves a baseline. Each function takes the
group's `AdvantageInputs` and returns one float64 per rollout. A reward that equals its baseline has an advantage of exactly 0,
however the baseline was rounded. Legend: G rollouts of the group.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from trivet.algorithms.arithmetic import rounding_error
from trivet.wire.rollouts import Group
from trivet.wire.versions import count_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """Everything that an advantage may depend on."""

    rewards: np.ndarray
    """float64 [G], finite."""
    completion_lengths: np.ndarray
    """int64 [G]: tokens that the policy sampled."""

    @classmethod
    def of(cls, group: Group) -> "AdvantageInputs":
        """Return the inputs of a finished group."""
        lengths = [sum(count_tokens(sample.versions) for sample in rollout.samples) for rollout in group.rollouts]
        return cls(rewards=group.rewards, completion_lengths=np.array(lengths, dtype=np.int64))


AdvantageFunction = Callable[[AdvantageInputs], np.ndarray]


def _above(baseline: np.ndarray | float, rewards: np.ndarray) -> np.ndarray:
    """Return what each reward is above `baseline`, which is computed from them: exactly 0 where they differ by rounding alone."""
    differences = rewards - baseline
    return np.where(np.abs(differences) <= rounding_error(rewards), 0.0, differences)


def mean_baseline(inputs: AdvantageInputs) -> np.ndarray:
    """Compute A_i = R_i - mean(R), without division by the standard deviation.

    Source: Dr. GRPO (arXiv 2503.20783), section 3; the default of prime-rl.
    """
    return _above(inputs.rewards.mean(), inputs.rewards)


def length_weighted_mean(inputs: AdvantageInputs) -> np.ndarray:
    """Compute A_i = R_i - sum_j(l_j R_j) / sum_j(l_j), with l the completion lengths; the plain mean when all are empty.

    The baseline of least variance when the gradient's squared norm grows with the length.
    Source: OPO (arXiv 2505.23585), equation 7.
    """
    weights = inputs.completion_lengths
    if not weights.any():
        return mean_baseline(inputs)
    return _above(float(np.average(inputs.rewards, weights=weights)), inputs.rewards)


def leave_one_out(inputs: AdvantageInputs) -> np.ndarray:
    """Compute A_i = R_i - mean_{j != i}(R_j), which is G / (G - 1) times the default.

    Source: RLOO (arXiv 2402.14740), equation 7. G is at least 2.
    """
    rewards = inputs.rewards
    return _above((rewards.sum() - rewards) / (len(rewards) - 1), rewards)


def standardised(inputs: AdvantageInputs, *, eps: float) -> np.ndarray:
    """Compute A_i = (R_i - mean(R)) / (std(R) + eps), with the sample standard deviation (G - 1 in the denominator).

    Source: GRPO (arXiv 2402.03300), section 4.1.2. G is at least 2.
    """
    rewards = inputs.rewards
    return _above(rewards.mean(), rewards) / (rewards.std(ddof=1) + eps)


def mean_normalised(inputs: AdvantageInputs) -> np.ndarray:
    """Compute A_i = (R_i - mean(R)) / mean(R): the rarer a success, the more it counts.

    It is zero throughout when no rollout has a reward.
    Source: MaxRL, as prime-rl has it under `max_rl`.
    """
    rewards = inputs.rewards
    if rewards.min() < 0:
        raise ValueError(f"max_rl divides by the mean reward and needs rewards >= 0, got {rewards.min():g}")
    mean = rewards.mean()
    return _above(mean, rewards) / mean if mean > 0 else np.zeros_like(rewards)


def raw_rewards(inputs: AdvantageInputs) -> np.ndarray:
    """Compute A_i = R_i: no baseline. For rewards that are already centred, or groups of one."""
    return inputs.rewards.copy()
