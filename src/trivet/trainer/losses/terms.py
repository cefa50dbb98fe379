"""Defines the result of a loss, and what all losses compute: ratios, common metrics, sums by sample. Pure functions of tensors.

A loss is computed for each row. `trainer.step` divides its terms by counts over the whole batch and takes gradients.

Legend: N loss tokens of a row, S samples with loss tokens in it. d = trainer - sampler log-probability, r = exp(d).
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Literal, NamedTuple

import torch

from trivet.config.schema.losses import NormalizedLossConfig
from trivet.trainer.device_copies import Selected
from trivet.trainer.model.logprobs import TokenScores
from trivet.trainer.rows import RowTensors

MAX_LOG_RATIO = 20.0
"""Upper limit of d before the exponential. Larger ratios are clipped or masked anyway, or their gradient would overflow."""


class LossUnit(StrEnum):
    """The divisor of a loss term: a count over all rows and ranks of the step, so that the layout of rows does not matter."""

    TOKEN = "token"
    """Loss tokens."""
    SAMPLE = "sample"
    """Samples with a loss token."""


class RowLoss(NamedTuple):
    """The loss of one row."""

    terms: dict[LossUnit, torch.Tensor]
    """Scalars with gradient, by their divisor; the step's loss is the sum of the quotients over all rows."""
    values: dict[str, torch.Tensor | Selected]
    """Detached per-token [N] or per-sample [S] values by metric name. Values of only some tokens are `Selected`."""
    tokens: dict[LossUnit, torch.Tensor] = {}
    """Detached per-token [N] parts of each term, whose sum is the term (`trainer.token_shares`). The loss of a whole sample is
    divided evenly among its tokens."""


Loss = Callable[[TokenScores, RowTensors], RowLoss]


class Ratios(NamedTuple):
    """The ratios of the trainer's probabilities to those with which the tokens were sampled, without gradient."""

    d_N: torch.Tensor
    """Log-ratio of each loss token."""
    ratio_N: torch.Tensor
    """exp(d), may overflow to infinity."""
    lengths_S: torch.Tensor
    """Loss tokens of each sample, as float."""
    sums_S: torch.Tensor
    """Sum of d over each sample."""


def make_ratios(scores: TokenScores, row: RowTensors) -> Ratios:
    """Compute the ratios of trainer to sampler probability for the loss tokens of `row`."""
    d_N = (scores.logprobs_N - row.sampler_logprobs_N).detach()
    return Ratios(
        d_N=d_N,
        ratio_N=d_N.exp(),
        lengths_S=sum_by_sample(torch.ones_like(d_N), row),
        sums_S=sum_by_sample(d_N, row),
    )


def mismatch_kl(log_ratio: torch.Tensor) -> torch.Tensor:
    """Compute r - d - 1 per token: a non-negative estimate of the KL divergence from sampler to trainer.

    Source: the k3 estimator, http://joschu.net/blog/kl-approx.html.
    """
    return torch.expm1(log_ratio) - log_ratio


def common_values(
    scores: TokenScores, row: RowTensors, ratios: Ratios, *, low_N: torch.Tensor, high_N: torch.Tensor, masked_N: torch.Tensor
) -> dict[str, torch.Tensor | Selected]:
    """Return the metrics that every policy loss has.

    Args:
        low_N, high_N: bool: tokens at the lower or upper bound of the loss, by a clip or a mask.
        masked_N: bool: tokens without any gradient.
    """
    kl_N = mismatch_kl(ratios.d_N)
    return {
        "entropy": scores.entropies_N.detach(),
        "importance_ratio": ratios.ratio_N,
        "mismatch_kl": kl_N,
        "masked_mismatch_kl": Selected(kl_N, masked_N),
        "unmasked_mismatch_kl": Selected(kl_N, ~masked_N),
        "is_masked": masked_N,
        "is_masked_low": low_N,
        "is_masked_high": high_N,
        "effective_sample_share": effective_sample_share(ratios, row),
    }


def effective_sample_share(ratios: Ratios, row: RowTensors) -> torch.Tensor:
    """Compute (sum r)^2 / (n sum r^2) over the n loss tokens of each sample: 1 for equal ratios, 1/n if one exceeds all others.

    Source: Kish's effective sample size over n, as in importance sampling (Owen 2013, Monte Carlo theory, section 9.3).
    """
    largest_S = reduce_by_sample(ratios.d_N, row, "amax")
    scaled_N = (ratios.d_N - largest_S[row.samples_N]).exp()  # the scale cancels; nothing overflows
    return sum_by_sample(scaled_N, row).square() / (ratios.lengths_S * sum_by_sample(scaled_N.square(), row))


def sum_by_sample(values_N: torch.Tensor, row: RowTensors) -> torch.Tensor:
    """Return the sum of each sample's values, [S]."""
    return values_N.new_zeros(row.num_samples).index_add_(0, row.samples_N, values_N)


def reduce_by_sample(values_N: torch.Tensor, row: RowTensors, how: Literal["amax", "amin"]) -> torch.Tensor:
    """Return the largest or the smallest of each sample's values, [S]."""
    return values_N.new_zeros(row.num_samples).scatter_reduce_(0, row.samples_N, values_N, how, include_self=False)


def make_loss(
    scores: TokenScores,
    row: RowTensors,
    ratios: Ratios,
    loss_N: torch.Tensor,
    *,
    unit: LossUnit = LossUnit.TOKEN,
    low_N: torch.Tensor,
    high_N: torch.Tensor,
    masked_N: torch.Tensor | None = None,
    **values: torch.Tensor,
) -> RowLoss:
    """Sum the loss over its tokens and add the common metrics.

    Args:
        masked_N: None: exactly the tokens of `low_N` and `high_N` are masked.
        values: further metrics by name.
    """
    masked_N = low_N | high_N if masked_N is None else masked_N
    detached_N = loss_N.detach()
    return RowLoss(
        {unit: loss_N.sum()},
        {
            "loss": detached_N if unit is LossUnit.TOKEN else sum_by_sample(detached_N, row),
            **common_values(scores, row, ratios, low_N=low_N, high_N=high_N, masked_N=masked_N),
            **values,
        },
        {unit: detached_N},
    )


def clip_objective(
    ratio: torch.Tensor, advantage: torch.Tensor, *, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return PPO's objective, and masks of where it is clipped below and above, so that it has no gradient."""
    objective = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    is_low = (ratio.detach() < low) & (advantage < 0)
    is_high = (ratio.detach() > high) & (advantage > 0)
    return objective, is_low, is_high


def normalise(
    loss_N: torch.Tensor, row: RowTensors, ratios: Ratios, config: NormalizedLossConfig
) -> tuple[torch.Tensor, LossUnit]:
    """Divide each token's loss as `config.normalization` says, and return the result with the unit of its sum."""
    match config.normalization:
        case "token":
            return loss_N, LossUnit.TOKEN
        case "sample":
            return loss_N / ratios.lengths_S[row.samples_N], LossUnit.SAMPLE
        case "constant":
            return loss_N / config.normalization_length, LossUnit.SAMPLE
