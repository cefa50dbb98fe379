"""Computes the scores of one environment under one policy. Pure functions."""

from collections.abc import Mapping, Sequence
from math import comb

import msgspec
import numpy as np

from trivet.algorithms.difficulty import has_passed

_Z95 = 1.959964
"""The number of standard deviations around the mean within which 95 % of a normal distribution lie."""


class MeanEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over examples with its confidence interval."""

    value: float
    ci95: float | None
    """Half-width of the 95 % confidence interval of `value`; None with fewer than two examples."""


class Summary(msgspec.Struct, kw_only=True):
    """The scores of one environment under one policy, as in summary.json."""

    env: str
    step: int
    """The policy's version; 0 is the base model."""
    digest: str
    """Digest of the policy's weights."""
    num_examples: int
    rollouts_per_example: int
    num_failed: int
    """Examples whose rollouts could not be completed. No score includes them."""
    first_error: str | None = None
    """The error of the first example that failed."""
    avg: float | None
    """avg@k: mean over examples of the mean reward of k rollouts. None when every example failed."""
    ci95: float | None
    """Half-width of the 95 % confidence interval of `avg`, over examples; None with fewer than two."""
    pass_at_k: float | None
    """Share of examples of which at least one of k rollouts got reward 1 or more."""
    pass_at: dict[str, MeanEstimate] = {}
    """pass@j for j = 1, 2, 4, … and k, by j: the probability that at least one of j rollouts succeeds."""
    truncated: float | None
    """Share of rollouts cut at a length limit."""
    completion_tokens: int
    scores: dict[str, float] = {}
    """Mean of each reward function and metric of the rubric, by name."""
    seconds: float
    """Wall-clock time of the evaluation of this environment."""


def mean_over_examples(values: Sequence[float]) -> MeanEstimate:
    """Return the mean of `values` with its confidence interval.

    Args:
        values: one mean per example, for at least one example. The interval is computed from these means because examples are
            independent of each other, while rollouts of the same example are not.

    Source: Miller 2024, arXiv 2411.00640, section 2.2.
    """
    column = np.asarray(values, dtype=np.float64)
    margin = float(_Z95 * column.std(ddof=1) / np.sqrt(len(column))) if len(column) > 1 else None
    return MeanEstimate(value=float(column.mean()), ci95=margin)


def pass_probability(num_rollouts: int, num_passed: int, *, j: int) -> float:
    """Return an unbiased estimate of pass@j from `num_rollouts` >= `j` rollouts, of which `num_passed` succeeded.

    Source: Chen et al. 2021, arXiv 2107.03374, equation 1.
    """
    return 1.0 - comb(num_rollouts - num_passed, j) / comb(num_rollouts, j)


def pass_at(rewards: Sequence[Sequence[float]]) -> dict[str, MeanEstimate]:
    """Return pass@j for the powers of two up to the number of rollouts k, and k itself.

    Args:
        rewards: per example, the rewards of its k rollouts; at least one example.
    """
    k = len(rewards[0])
    powers = {2**exponent for exponent in range(k.bit_length())} | {k}
    passed = [sum(has_passed(reward) for reward in group) for group in rewards]
    return {str(j): mean_over_examples([pass_probability(k, count, j=j) for count in passed]) for j in sorted(powers) if j <= k}


def eval_metrics(summaries: Mapping[str, Summary]) -> dict[str, float]:
    """Return the metrics `eval/<env>/…` of each environment. A score that is None is left out."""
    values: dict[str, float] = {}
    for name, summary in summaries.items():
        prefix, k = f"eval/{name}", summary.rollouts_per_example
        found = {
            f"avg@{k}": summary.avg,
            f"avg@{k}/ci95": summary.ci95,
            **{f"pass@{j}": estimate.value for j, estimate in summary.pass_at.items()},
            **{f"pass@{j}/ci95": estimate.ci95 for j, estimate in summary.pass_at.items()},
            **{f"metrics/{score}": value for score, value in summary.scores.items()},
            "is_truncated/mean": summary.truncated,
            "completion_tokens": float(summary.completion_tokens),
            "failed_examples": float(summary.num_failed),
            "time": summary.seconds,
        }
        values |= {f"{prefix}/{metric}": value for metric, value in found.items() if value is not None}
    return values
