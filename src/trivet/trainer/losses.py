"""What is minimised, as pure functions of one row's scores. Both losses are sums; the step divides by a global count.

Legend: N loss tokens of a row, S samples with loss tokens in it. d = trainer - sampler log-probability, r = exp(d).
"""

from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import NamedTuple

import torch

from trivet.config.trainer import LossConfig
from trivet.trainer.logprobs import TokenScores
from trivet.trainer.rows import RowTensors

_MAX_LOG_RATIO = 10.0
"""Sequence log-ratios are cut here before the exponential, as in the source."""


class RowLoss(NamedTuple):
    total: torch.Tensor
    """Scalar with gradient: the sum that the step divides by its count of units."""
    values: dict[str, torch.Tensor]
    """Detached per-token [N] or per-sample [S] values by metric name; the mean of `loss` over a step is the step's loss."""


class Unit(StrEnum):
    """What the sum over a step is divided by: a count over all rows and ranks, so that layout does not matter."""

    TOKEN = "token"
    SAMPLE = "sample"


class Loss(NamedTuple):
    compute: Callable[[TokenScores, RowTensors], RowLoss]
    unit: Unit


def make_policy_loss(config: LossConfig) -> Loss:
    unit = Unit.TOKEN if config.ratio_type == "token" else Unit.SAMPLE
    return Loss(partial(policy_loss, config=config), unit)


def make_cross_entropy() -> Loss:
    return Loss(cross_entropy, Unit.TOKEN)


def mismatch_kl(log_ratio: torch.Tensor) -> torch.Tensor:
    """r - d - 1 per token: a non-negative estimate of the KL divergence from sampler to trainer.

    Source: the k3 estimator, http://joschu.net/blog/kl-approx.html.
    """
    return torch.expm1(log_ratio) - log_ratio


def policy_loss(scores: TokenScores, row: RowTensors, *, config: LossConfig) -> RowLoss:
    """Masked, detached importance sampling: - sum over kept tokens of sg(rho * (adv_tau * A - kl_tau * d)) * logprob.

    With ratio_type `token`, rho = r and the step divides by its loss tokens, masked ones included. With `sequence`, rho is
    the clipped product over the sample, each sample's sum is divided by its own number of loss tokens, and the step divides
    by its samples: every sample weighs the same however long it is, and however samples share rows.

    Source: prime-rl's default loss of December 2025 to March 2026.
    """
    logprobs_N = scores.logprobs_N
    d_N = (logprobs_N - row.sampler_logprobs_N).detach()
    ratio_N = d_N.exp()
    counts_S = _sum_by_sample(torch.ones_like(d_N), row)
    sums_S = _sum_by_sample(d_N, row)
    geo_S = (sums_S / counts_S).exp()
    low_N, high_N = ratio_N < config.token_mask_low, ratio_N > config.token_mask_high
    geo_low_S, geo_high_S = geo_S < config.geo_mask_low, geo_S > config.geo_mask_high
    sequence_low_S = _reduce_by_sample(ratio_N, row, "amin") < config.sequence_mask_low
    sequence_high_S = _reduce_by_sample(ratio_N, row, "amax") > config.sequence_mask_high
    masked_S = geo_low_S | geo_high_S | sequence_low_S | sequence_high_S
    masked_N = low_N | high_N | masked_S[row.samples_N]
    if config.ratio_type == "token":
        rho_N, weight_N = ratio_N, torch.ones_like(d_N)
    else:
        rho_S = sums_S.clamp(max=_MAX_LOG_RATIO).exp().clamp(max=config.sequence_clip_high)
        rho_N, weight_N = rho_S[row.samples_N], (1.0 / counts_S)[row.samples_N]
    coefficient_N = rho_N * (config.adv_tau * row.advantages_N - config.kl_tau * d_N)
    # A ratio that overflowed is masked; multiplied by zero it would still be NaN.
    loss_N = -torch.where(masked_N, 0.0, coefficient_N) * weight_N * logprobs_N
    kl_N = mismatch_kl(d_N)
    values = {
        "loss": loss_N.detach() if config.ratio_type == "token" else _sum_by_sample(loss_N.detach(), row),
        "entropy": scores.entropies_N,
        "mismatch_kl": kl_N,
        "masked_mismatch_kl": kl_N[masked_N],
        "unmasked_mismatch_kl": kl_N[~masked_N],
        "is_masked": masked_N,
        "is_masked_low": low_N,
        "is_masked_high": high_N,
        "sequence_masked_low": sequence_low_S,
        "sequence_masked_high": sequence_high_S,
        "geo_masked_low": geo_low_S,
        "geo_masked_high": geo_high_S,
        "geo_seq_ratio": geo_S,
    }
    return RowLoss(loss_N.sum(), values)


def cross_entropy(scores: TokenScores, row: RowTensors) -> RowLoss:
    """- log-probability of each loss token."""
    loss_N = -scores.logprobs_N
    return RowLoss(loss_N.sum(), {"loss": loss_N.detach(), "entropy": scores.entropies_N})


def _sum_by_sample(values_N: torch.Tensor, row: RowTensors) -> torch.Tensor:
    return values_N.new_zeros(row.num_samples).index_add_(0, row.samples_N, values_N)


def _reduce_by_sample(values_N: torch.Tensor, row: RowTensors, how: str) -> torch.Tensor:
    return values_N.new_zeros(row.num_samples).scatter_reduce_(0, row.samples_N, values_N, how, include_self=False)
