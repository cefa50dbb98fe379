"""What an evaluation says: scores of one environment under one policy. Pure."""

from collections.abc import Sequence

import msgspec
import numpy as np

_Z95 = 1.959964
"""Two-sided 95 % quantile of the normal distribution."""


class Summary(msgspec.Struct, kw_only=True):
    env: str
    step: int
    """The policy's version; 0 is the base model."""
    digest: str
    num_examples: int
    rollouts_per_example: int
    num_failed: int
    """Examples whose rollouts could not be completed; they are in no score."""
    avg: float | None
    """avg@k: mean over examples of the mean reward of k rollouts. None when every example failed."""
    ci95: float | None
    """Half-width of the 95 % confidence interval of `avg`, over examples; None with fewer than two."""
    pass_at_k: float | None
    """Share of examples of which at least one of k rollouts got reward 1 or more."""
    truncated: float | None
    """Share of rollouts cut at a length limit."""
    completion_tokens: int
    seconds: float


def average(rewards: Sequence[Sequence[float]]) -> tuple[float | None, float | None, float | None]:
    """avg@k, half-width of its 95 % interval, pass@k.

    Args:
        rewards: per example, the rewards of its rollouts. Examples are independent, rollouts of one are not: the interval is
            over example means (Miller 2024, arXiv 2411.00640, section 2.2).
    """
    if not rewards:
        return None, None, None
    means = np.array([np.mean(row) for row in rewards])
    passed = float(np.mean([max(row) >= 1.0 for row in rewards]))
    half = float(_Z95 * means.std(ddof=1) / np.sqrt(len(means))) if len(means) > 1 else None
    return float(means.mean()), half, passed
