"""Defines CISPO and AIPO: policy gradients with detached importance weights, which are clipped and never mask a token."""

import torch

from trivet.config.sections.losses import AipoLossConfig, CispoLossConfig
from trivet.trainer.losses.terms import LossUnit, Ratios, RowLoss, common_values, make_ratios
from trivet.trainer.model.logprobs import TokenScores
from trivet.trainer.rows import RowTensors


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
    ratios: Ratios = make_ratios(scores, row)
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
