"""Defines the default loss: masked, detached importance sampling."""

import torch

from trivet.config.schema.trainer import DefaultLossConfig
from trivet.trainer.losses.terms import (
    LossUnit,
    RowLoss,
    common_values,
    make_ratios,
    max_by_sample,
    min_by_sample,
    sum_by_sample,
)
from trivet.trainer.model.logprobs import TokenScores
from trivet.trainer.rows import RowTensors

_MAX_LOG_RATIO = 10.0
"""Sequence log-ratios are cut here before the exponential, as in the source."""


def default_loss(scores: TokenScores, row: RowTensors, *, config: DefaultLossConfig) -> RowLoss:
    """Compute - sum over kept tokens of sg(rho * (adv_tau * A + teacher_tau * (teacher - logprob) - kl_tau * d)) * logprob.

    With ratio_type `token`, rho = r and the step divides by its loss tokens, masked ones included. With `sequence`, rho is
    the clipped product over the sample, each sample's sum is divided by its own number of loss tokens, and the step divides
    by its samples: every sample weighs the same however long it is, and however samples share rows.

    Bias: on policy (r = 1) the gradient is that of the expected advantage. Off policy, `token` leaves out the ratios of the
    tokens before (first order in d); `sequence` is unbiased for samples of one length as long as nothing is clipped or
    masked. Every mask and clip biases towards the sampling policy and bounds the variance.

    The teacher's term is a reward of its own for each token. On policy it gives the gradient of the mean over the sampled
    prefixes of KL(policy || teacher) of the next token; what a token does to later ones is left out. Temperature: the teacher's
    log-probabilities are its own, at temperature 1, whatever the policy is sampled with.

    Source: prime-rl's default loss of December 2025 to March 2026.
    """
    logprobs_N = scores.logprobs_N
    ratios = make_ratios(scores, row)
    d_N, ratio_N = ratios.d_N, ratios.ratio_N
    geo_S = (ratios.sums_S / ratios.lengths_S).exp()
    low_N, high_N = ratio_N < config.token_mask_low, ratio_N > config.token_mask_high
    geo_low_S, geo_high_S = geo_S < config.geo_mask_low, geo_S > config.geo_mask_high
    sequence_low_S = min_by_sample(ratio_N, row) < config.sequence_mask_low
    sequence_high_S = max_by_sample(ratio_N, row) > config.sequence_mask_high
    masked_S = geo_low_S | geo_high_S | sequence_low_S | sequence_high_S
    masked_N = low_N | high_N | masked_S[row.samples_N]
    if config.ratio_type == "token":
        rho_N, weight_N, unit = ratio_N, torch.ones_like(d_N), LossUnit.TOKEN
    else:
        rho_S = ratios.sums_S.clamp(max=_MAX_LOG_RATIO).exp().clamp(max=config.sequence_clip_high)
        rho_N, weight_N, unit = rho_S[row.samples_N], (1.0 / ratios.lengths_S)[row.samples_N], LossUnit.SAMPLE
    pull_N = config.adv_tau * row.advantages_N - config.kl_tau * d_N
    teacher_values: dict[str, torch.Tensor] = {}
    if row.teacher_logprobs_N is not None:
        teacher_kl_N = logprobs_N.detach() - row.teacher_logprobs_N
        pull_N = pull_N - config.teacher_tau * teacher_kl_N
        teacher_values["teacher_kl"] = teacher_kl_N
    coefficient_N = rho_N * pull_N
    # A ratio that overflowed is masked; multiplied by zero it would still be NaN.
    loss_N = -torch.where(masked_N, 0.0, coefficient_N) * weight_N * logprobs_N
    values = {
        "loss": loss_N.detach() if unit is LossUnit.TOKEN else sum_by_sample(loss_N.detach(), row),
        **common_values(scores, row, ratios, low_N=low_N, high_N=high_N, masked_N=masked_N),
        "sequence_masked_low": sequence_low_S,
        "sequence_masked_high": sequence_high_S,
        "geo_masked_low": geo_low_S,
        "geo_masked_high": geo_high_S,
        "geo_seq_ratio": geo_S,
        **teacher_values,
    }
    return RowLoss({unit: loss_N.sum()}, values)
