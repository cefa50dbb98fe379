"""Defines PPO's clipped objective: per token (GRPO, DAPO, Dr. GRPO) and per sample (GSPO).

CISPO and AIPO clip detached importance weights instead, and never mask a token.
"""

import torch

from trivet.config.schema.trainer import AipoLossConfig, CispoLossConfig, GrpoLossConfig, GspoLossConfig
from trivet.trainer.losses.terms import LossUnit, RowLoss, common_values, make_ratios, sum_by_sample
from trivet.trainer.model.logprobs import TokenScores
from trivet.trainer.rows import RowTensors

_MAX_LOG_RATIO = 20.0
"""d is cut here before the exponential. Beyond it either the clip decides, or the gradient would overflow."""


def grpo_loss(scores: TokenScores, row: RowTensors, *, config: GrpoLossConfig) -> RowLoss:
    """Compute - sum of min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A), with gradient through r where the minimum has one.

    `normalization` says what the sum is divided by. `sample` makes the tokens of long samples weigh less than those of short
    ones, a bias that Dr. GRPO removes with a constant length.

    Bias: unbiased on policy up to that weighting. Off policy, the ratios of earlier tokens are left out and clipped tokens
    have no gradient.

    Source: GRPO, arXiv 2402.03300, equation 3; token normalization and a higher upper clip: DAPO, arXiv 2503.14476, equation 8;
    constant normalization: Dr. GRPO, arXiv 2503.20783, section 3.2.
    """
    ratios = make_ratios(scores, row)
    ratio_N = (scores.logprobs_N - row.sampler_logprobs_N).clamp(max=_MAX_LOG_RATIO).exp()
    objective_N, low_N, high_N = _clipped(ratio_N, row.advantages_N, low=1.0 - config.clip_low, high=1.0 + config.clip_high)
    match config.normalization:
        case "token":
            loss_N, unit = -objective_N, LossUnit.TOKEN
        case "sample":
            loss_N, unit = -objective_N / ratios.lengths_S[row.samples_N], LossUnit.SAMPLE
        case "constant":
            loss_N, unit = -objective_N / config.normalization_length, LossUnit.SAMPLE
    values = {
        "loss": loss_N.detach() if unit is LossUnit.TOKEN else sum_by_sample(loss_N.detach(), row),
        **common_values(scores, row, ratios, low_N=low_N, high_N=high_N, masked_N=low_N | high_N),
    }
    return RowLoss({unit: loss_N.sum()}, values)


def gspo_loss(scores: TokenScores, row: RowTensors, *, config: GspoLossConfig) -> RowLoss:
    """Compute - sum over samples of min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A), s = exp(mean of d over the sample).

    Each sample weighs the same; the step divides by its samples.

    Bias: on policy the gradient is that of the expected advantage over each sample's length, so long samples weigh less. Off
    policy, s is the length's root of the exact ratio: less variance, and biased.

    Source: GSPO, arXiv 2507.18071, equations 5 and 7.
    """
    ratios = make_ratios(scores, row)
    d_N = scores.logprobs_N - row.sampler_logprobs_N
    ratio_S = (sum_by_sample(d_N, row) / ratios.lengths_S).clamp(max=_MAX_LOG_RATIO).exp()
    advantage_S = sum_by_sample(row.advantages_N, row) / ratios.lengths_S
    objective_S, low_S, high_S = _clipped(ratio_S, advantage_S, low=1.0 - config.clip_low, high=1.0 + config.clip_high)
    low_N, high_N = low_S[row.samples_N], high_S[row.samples_N]
    values = {
        "loss": -objective_S.detach(),
        **common_values(scores, row, ratios, low_N=low_N, high_N=high_N, masked_N=low_N | high_N),
        "geo_seq_ratio": ratio_S.detach(),
    }
    return RowLoss({LossUnit.SAMPLE: -objective_S.sum()}, values)


def _clipped(
    ratio: torch.Tensor, advantage: torch.Tensor, *, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the objective, and where it is cut off below and above; there it has no gradient."""
    objective = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    is_low = (ratio.detach() < low) & (advantage < 0)
    is_high = (ratio.detach() > high) & (advantage > 0)
    return objective, is_low, is_high


def cispo_loss(scores: TokenScores, row: RowTensors, *, config: CispoLossConfig) -> RowLoss:
    """Compute - sum of sg(clip(r, 1 - clip_low, 1 + clip_high)) * A * logprob, over the step's loss tokens.

    Bias: unbiased on policy. Off policy it is biased by the ratios of earlier tokens, which are left out, and by the clip;
    unlike with PPO every token keeps a gradient.

    Source: MiniMax-M1, arXiv 2506.13585, equations 4 and 5.
    """
    return _weighted(scores, row, low=1.0 - config.clip_low, high=1.0 + config.clip_high)


def aipo_loss(scores: TokenScores, row: RowTensors, *, config: AipoLossConfig) -> RowLoss:
    """Compute - sum of sg(min(r, clip_ratio)) * A * logprob, over the step's loss tokens.

    Bias: as `cispo_loss` without a lower bound; the truncation from above is that of V-trace and bounds the variance.

    Source: AIPO, LlamaRL, arXiv 2505.24034, section 6.
    """
    return _weighted(scores, row, low=0.0, high=config.clip_ratio)


def _weighted(scores: TokenScores, row: RowTensors, *, low: float, high: float) -> RowLoss:
    ratios = make_ratios(scores, row)
    weight_N = ratios.ratio_N.clamp(min=low, max=high)
    loss_N = -weight_N * row.advantages_N * scores.logprobs_N
    values = common_values(
        scores,
        row,
        ratios,
        low_N=ratios.ratio_N < low,
        high_N=ratios.ratio_N > high,
        masked_N=torch.zeros_like(ratios.ratio_N, dtype=torch.bool),
    )
    return RowLoss({LossUnit.TOKEN: loss_N.sum()}, {"loss": loss_N.detach(), **values})
