"""Defines the losses with one importance ratio for each sample: GSPO, LUSPO, GMPO and VESPO. Called by `trainer.losses.formulas`.

They differ in how a sample's ratio is made of its tokens', and in how far a sample may move. With an advantage per token, the first
three take the sample's mean.
"""

import math

import torch

from trivet.config.schema.losses import GmpoLossConfig, GspoLossConfig, LuspoLossConfig, VespoLossConfig
from trivet.trainer.losses.terms import (
    MAX_LOG_RATIO,
    LossUnit,
    Ratios,
    RowLoss,
    clip_objective,
    common_values,
    make_loss,
    make_ratios,
    sum_by_sample,
)
from trivet.trainer.model.logprobs import TokenScores
from trivet.trainer.rows import RowTensors

_MIN_SEQUENCE_LOG_RATIO = math.log(1e-8)
"""Lower limit of a sample's summed d in VESPO, as in its source. A sample that unlikely has a weight of about 0."""


def gspo_loss(scores: TokenScores, row: RowTensors, *, config: GspoLossConfig | LuspoLossConfig) -> RowLoss:
    """Compute minus the sum over samples of min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A), s = exp(mean d of a sample).

    The step divides by its samples. In GSPO each sample weighs the same; LUSPO multiplies each by its number of loss tokens.

    Bias: on policy the gradient of GSPO is that of the expected advantage over each sample's length, so long samples weigh less.
    That of LUSPO has no such bias. Off policy, s is the length's root of the exact ratio: less variance, and biased.

    Source: GSPO, arXiv 2507.18071, equations 5 and 7; LUSPO, arXiv 2602.05261, section 4; its bounds: section 5.1.
    """
    ratios = make_ratios(scores, row)
    d_N = scores.logprobs_N - row.sampler_logprobs_N
    ratio_S = (sum_by_sample(d_N, row) / ratios.lengths_S).clamp(max=MAX_LOG_RATIO).exp()
    advantage_S = sum_by_sample(row.advantages_N, row) / ratios.lengths_S
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    objective_S, low_S, high_S = clip_objective(ratio_S, advantage_S, low=low, high=high)
    if config.type == "luspo":
        objective_S = objective_S * ratios.lengths_S
    low_N, high_N = low_S[row.samples_N], high_S[row.samples_N]
    return _make_sample_loss(scores, row, ratios, -objective_S, ratio_S, low_N=low_N, high_N=high_N)


def gmpo_loss(scores: TokenScores, row: RowTensors, *, config: GmpoLossConfig) -> RowLoss:
    """Compute minus the sum over samples of A * exp(mean of c), c = d bounded by clip_high where A > 0, by -clip_low where A < 0.

    The step divides by its samples. A clipped token has no gradient of its own, and its ratio stays in the sample's mean.

    Bias: on policy as GSPO. Off policy a geometric mean moves less than the product when a single token has moved far.

    Source: GMPO, arXiv 2507.20673, equation 4; clips of the log-ratio: section 4, algorithm 1.
    """
    ratios = make_ratios(scores, row)
    d_N = scores.logprobs_N - row.sampler_logprobs_N
    high_N = (row.advantages_N > 0) & (ratios.d_N > config.clip_high)
    low_N = (row.advantages_N < 0) & (ratios.d_N < -config.clip_low)
    clipped_N = torch.where(high_N, config.clip_high, torch.where(low_N, -config.clip_low, d_N))
    ratio_S = (sum_by_sample(clipped_N, row) / ratios.lengths_S).clamp(max=MAX_LOG_RATIO).exp()
    advantage_S = sum_by_sample(row.advantages_N, row) / ratios.lengths_S
    return _make_sample_loss(scores, row, ratios, -advantage_S * ratio_S, ratio_S, low_N=low_N, high_N=high_N)


def vespo_loss(scores: TokenScores, row: RowTensors, *, config: VespoLossConfig) -> RowLoss:
    """Compute minus the sum of sg(w^k * exp(lambda * (1 - w))) * A * logprob over the step's loss tokens, w = exp(sum of d).

    w is the product of the sample's ratios. k and lambda are those of the sign of A. The weight is 1 at w = 1, largest at
    w = k / lambda, and falls to 0 on both sides.

    Bias: unbiased on policy. Off policy the weight is not w, but bounded, and every token keeps a gradient.

    Source: VESPO, arXiv 2602.10693; its constants are those of TRL.
    """
    ratios = make_ratios(scores, row)
    bounded_N = ratios.d_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    log_w_N = sum_by_sample(bounded_N, row).clamp(_MIN_SEQUENCE_LOG_RATIO, MAX_LOG_RATIO)[row.samples_N]
    is_negative_N = row.advantages_N < 0
    k_N = torch.where(is_negative_N, config.k_neg, config.k_pos)
    lambda_N = torch.where(is_negative_N, config.lambda_neg, config.lambda_pos)
    weight_N = (k_N * log_w_N - lambda_N * torch.expm1(log_w_N)).exp()
    none_N = torch.zeros_like(is_negative_N)
    loss_N = -weight_N * row.advantages_N * scores.logprobs_N
    return make_loss(scores, row, ratios, loss_N, low_N=none_N, high_N=none_N, sample_weight=weight_N)


def _make_sample_loss(
    scores: TokenScores,
    row: RowTensors,
    ratios: Ratios,
    loss_S: torch.Tensor,
    ratio_S: torch.Tensor,
    *,
    low_N: torch.Tensor,
    high_N: torch.Tensor,
) -> RowLoss:
    """Sum the loss over its samples and add the metrics. Tokens of `low_N` and `high_N` have no gradient."""
    values = {
        "loss": loss_S.detach(),
        **common_values(scores, row, ratios, low_N=low_N, high_N=high_N, masked_N=low_N | high_N),
        "geo_seq_ratio": ratio_S.detach(),
    }
    tokens_N = (values["loss"] / ratios.lengths_S)[row.samples_N]
    return RowLoss({LossUnit.SAMPLE: loss_S.sum()}, values, {LossUnit.SAMPLE: tokens_N})
