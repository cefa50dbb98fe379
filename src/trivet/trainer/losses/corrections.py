"""Defines the losses that correct for the sampler by a named preset, with and without a proximal policy. Called by
`trainer.losses.formulas`. The presets and their bounds are in `config.schema.losses`.
"""

import torch

from trivet.config.schema.losses import CorrectionPreset, DecoupledLossConfig, ImportanceLossConfig
from trivet.trainer.losses.terms import MAX_LOG_RATIO, RowLoss, clip_objective, make_loss, make_ratios, normalise, sum_by_sample
from trivet.trainer.model.logprobs import TokenScores
from trivet.trainer.rows import RowTensors


def corrected_loss(scores: TokenScores, row: RowTensors, *, config: ImportanceLossConfig | DecoupledLossConfig) -> RowLoss:
    """Compute minus the sum of sg(w) * A * logprob, or of sg(w) * min(u * A, clip(u, 1 - clip_low, 1 + clip_high) * A).

    The first is `importance`, the second `decoupled`. w is the preset's weight of a policy to the sampler, and `normalization`
    selects the divisor. In `importance` that policy is the trainer's. In `decoupled` it is the proximal policy, from which the
    first update of the batch started, and u = policy / proximal policy. So at the first update u = 1, and both losses have the
    same gradient. Later updates of the batch (trainer.num_iterations) are clipped around the proximal policy, not around the
    older sampler.

    Bias: unbiased on policy. Off policy, token weights leave out the ratios of earlier tokens; a product over the sample is exact
    for samples of one length. Truncation, masks and clips bias towards the sampling policy and bound the variance.

    Source: verl's `rollout_correction` after https://richardli.xyz/rl-collapse; IcePop: arXiv 2510.18855; a proximal policy:
    arXiv 2110.00641; AReaL, arXiv 2505.24298, section 5.2.
    """
    ratios = make_ratios(scores, row)
    trainer_N, advantages_N = scores.logprobs_N, row.advantages_N
    proximal_N = row.proximal_logprobs_N if isinstance(config, DecoupledLossConfig) else None
    if proximal_N is None:
        proximal_N = trainer_N.detach()
    weight_N, low_N, high_N, masked_N = _correct(proximal_N - row.sampler_logprobs_N, ratios.lengths_S, row, config.correction)
    if isinstance(config, DecoupledLossConfig):
        ratio_N = (trainer_N - proximal_N).clamp(max=MAX_LOG_RATIO).exp()
        low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
        objective_N, clipped_low_N, clipped_high_N = clip_objective(ratio_N, advantages_N, low=low, high=high)
        low_N, high_N, masked_N = low_N | clipped_low_N, high_N | clipped_high_N, masked_N | clipped_low_N | clipped_high_N
    else:
        objective_N = advantages_N * trainer_N
    loss_N, unit = normalise(-weight_N * objective_N, row, ratios, config)
    return make_loss(scores, row, ratios, loss_N, unit=unit, low_N=low_N, high_N=high_N, masked_N=masked_N)


def _correct(
    d_N: torch.Tensor, lengths_S: torch.Tensor, row: RowTensors, preset: CorrectionPreset
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the weight from the detached log-ratio, and masks of where it is below a bound, above one, and 0 for that."""
    match preset.weight:
        case "none":
            weight_N = torch.ones_like(d_N)
        case "token":
            weight_N = d_N.clamp(max=MAX_LOG_RATIO).exp()
        case "sequence":
            weight_N = sum_by_sample(d_N, row).clamp(max=MAX_LOG_RATIO).exp()[row.samples_N]
    mean_N = (sum_by_sample(d_N, row) / lengths_S).exp()[row.samples_N]
    low_N, high_N = weight_N < preset.low, weight_N > preset.high
    geo_low_N, geo_high_N = mean_N < preset.geo_low, mean_N > preset.geo_high
    masked_N = geo_low_N | geo_high_N | ((low_N | high_N) if preset.is_masking else torch.zeros_like(low_N))
    weight_N = torch.where(masked_N, 0.0, weight_N.clamp(preset.low, preset.high))
    return weight_N, low_N | geo_low_N, high_N | geo_high_N, masked_N
