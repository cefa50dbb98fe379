"""Defines DPPO and IPO, which mask tokens whose probability has moved too far. Distances are in probability, p = exp(logprob)."""

import torch

from trivet.config.schema.trainer import DppoLossConfig, IpoLossConfig
from trivet.trainer.losses.terms import LossUnit, Ratios, RowLoss, common_values, make_ratios
from trivet.trainer.model.logprobs import TokenScores
from trivet.trainer.rows import RowTensors

_MAX_LOG_RATIO = 20.0
"""d is cut here before the exponential; a token that far away is masked, or has an advantage that pulls it back."""


def dppo_loss(scores: TokenScores, row: RowTensors, *, config: DppoLossConfig) -> RowLoss:
    """Compute the sum of -keep * adv_tau * A * r + kl_tau * d^2 over the step's loss tokens, with gradient through r and d.

    keep is false where p_trainer - p_sampler > dppo_mask_high and A > 0, or < -dppo_mask_low and A <= 0: the token has
    already gone far in the direction in which its advantage pushes. The penalty acts on masked tokens too.

    Bias: unbiased on policy (where d = 0 the penalty has no gradient). Off policy, ratios of earlier tokens are left out,
    and the mask and the penalty bias towards the sampling policy.

    Source: prime-rl's default loss since 2026; DPPO, arXiv 2602.04879.
    """
    moved_N = _probability_change(scores, row)
    is_up_N = row.advantages_N > 0
    high_N = is_up_N & (moved_N > config.dppo_mask_high)
    low_N = ~is_up_N & (moved_N < -config.dppo_mask_low)
    return _masked(scores, row, low_N=low_N, high_N=high_N, adv_tau=config.adv_tau, kl_tau=config.kl_tau)


def ipo_loss(scores: TokenScores, row: RowTensors, *, config: IpoLossConfig) -> RowLoss:
    """Compute the sum of -keep * adv_tau * A * r + kl_tau * d^2 over the step's loss tokens, with gradient through r and d.

    keep = |p_trainer - p_sampler| <= ipo_threshold, whatever the sign of A: in asynchronous training each batch is used once,
    and the sign does not predict where the policy has moved since.

    Bias: as `dppo_loss`.

    Source: prime-rl, March 2026.
    """
    moved_N = _probability_change(scores, row)
    high_N, low_N = moved_N > config.ipo_threshold, moved_N < -config.ipo_threshold
    return _masked(scores, row, low_N=low_N, high_N=high_N, adv_tau=config.adv_tau, kl_tau=config.kl_tau)


def _probability_change(scores: TokenScores, row: RowTensors) -> torch.Tensor:
    return scores.logprobs_N.detach().exp() - row.sampler_logprobs_N.exp()


def _masked(
    scores: TokenScores, row: RowTensors, *, low_N: torch.Tensor, high_N: torch.Tensor, adv_tau: float, kl_tau: float
) -> RowLoss:
    ratios: Ratios = make_ratios(scores, row)
    masked_N = low_N | high_N
    d_N = scores.logprobs_N - row.sampler_logprobs_N
    gain_N = torch.where(masked_N, 0.0, adv_tau * row.advantages_N) * d_N.clamp(max=_MAX_LOG_RATIO).exp()
    loss_N = -gain_N + kl_tau * d_N.square()
    values = common_values(scores, row, ratios, low_N=low_N, high_N=high_N, masked_N=masked_N)
    return RowLoss({LossUnit.TOKEN: loss_N.sum()}, {"loss": loss_N.detach(), **values})
