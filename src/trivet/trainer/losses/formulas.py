"""Defines the losses, and makes the one that `[trainer.loss]` configures: masked importance sampling (the default), PPO's clipped
objective, clipped importance weights, masks by the change in probability, and the cross-entropy of supervised fine-tuning.

PPO's objective is clipped per token (GRPO, DAPO, Dr. GRPO), and SAPO has a smooth gate instead of the clip. CISPO and AIPO clip
detached importance weights instead, and never mask a token. DPPO and IPO mask tokens whose probability, p = exp(logprob), has moved
too far. Clip-Cov and KL-Cov treat a few tokens of the step differently (`trainer.losses.choice`). Losses with one ratio per sample
are in `trainer.losses.samples`, corrections by a named preset in `trainer.losses.corrections`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from trivet.config.schema.losses import (
    AipoLossConfig,
    CispoLossConfig,
    ClipCovLossConfig,
    CustomLossConfig,
    DefaultLossConfig,
    DppoLossConfig,
    GrpoLossConfig,
    IpoLossConfig,
    KlCovLossConfig,
    LossConfig,
    PolicyLossConfig,
    SapoLossConfig,
)
from trivet.trainer.device_copies import Selected
from trivet.trainer.losses.corrections import corrected_loss
from trivet.trainer.losses.custom import load_custom_loss
from trivet.trainer.losses.samples import gmpo_loss, gspo_loss, vespo_loss
from trivet.trainer.losses.terms import (
    MAX_LOG_RATIO,
    Loss,
    LossUnit,
    RowLoss,
    clip_objective,
    make_loss,
    make_ratios,
    normalise,
    reduce_by_sample,
)
from trivet.trainer.model.logprobs import TokenScores
from trivet.trainer.rows import RowTensors

_MAX_SEQUENCE_LOG_RATIO = 10.0
"""Upper limit of a sample's summed d before the exponential in the default loss, as in the source."""


def default_loss(scores: TokenScores, row: RowTensors, *, config: DefaultLossConfig) -> RowLoss:
    """Compute minus the sum over kept tokens of sg(rho * (adv_tau * A + teacher_tau * (teacher - logprob) - kl_tau * d)) * logprob.

    With ratio_type `token`, rho = r and the step divides by its loss tokens, masked ones included. With `sequence`, rho is
    the clipped product over the sample, each sample's sum is divided by its own number of loss tokens, and the step divides
    by its samples: every sample weighs the same however long it is, and however samples share rows.

    Bias: on policy (r = 1) the gradient is that of the expected advantage. Off policy, `token` leaves out the ratios of the
    tokens before (first order in d); `sequence` is unbiased for samples of one length as long as nothing is clipped or
    masked. Every mask and clip biases towards the sampling policy and bounds the variance.

    The teacher's term is a reward of its own for each token. On policy its gradient is that of KL(policy || teacher) of the next
    token, averaged over the sampled prefixes; a token's effect on later tokens is left out. The teacher's log-probabilities are at
    temperature 1, even if the policy is sampled at another.

    Source: prime-rl's default loss of December 2025 to March 2026.
    """
    logprobs_N = scores.logprobs_N
    ratios = make_ratios(scores, row)
    d_N, ratio_N = ratios.d_N, ratios.ratio_N
    geo_S = (ratios.sums_S / ratios.lengths_S).exp()
    low_N, high_N = ratio_N < config.token_mask_low, ratio_N > config.token_mask_high
    geo_low_S, geo_high_S = geo_S < config.geo_mask_low, geo_S > config.geo_mask_high
    sequence_low_S = reduce_by_sample(ratio_N, row, "amin") < config.sequence_mask_low
    sequence_high_S = reduce_by_sample(ratio_N, row, "amax") > config.sequence_mask_high
    masked_S = geo_low_S | geo_high_S | sequence_low_S | sequence_high_S
    masked_N = low_N | high_N | masked_S[row.samples_N]
    if config.ratio_type == "token":
        rho_N, weight_N, unit = ratio_N, torch.ones_like(d_N), LossUnit.TOKEN
    else:
        rho_S = ratios.sums_S.clamp(max=_MAX_SEQUENCE_LOG_RATIO).exp().clamp(max=config.sequence_clip_high)
        rho_N, weight_N, unit = rho_S[row.samples_N], (1.0 / ratios.lengths_S)[row.samples_N], LossUnit.SAMPLE
    pull_N = config.adv_tau * row.advantages_N - config.kl_tau * d_N
    teacher_values: dict[str, torch.Tensor] = {}
    if row.teacher_logprobs_N is not None:
        teacher_values["teacher_kl"] = logprobs_N.detach() - row.teacher_logprobs_N
        pull_N = pull_N - config.teacher_tau * teacher_values["teacher_kl"]
    # A ratio that has overflowed is masked by `where`, because infinity multiplied by zero would be NaN.
    loss_N = -torch.where(masked_N, 0.0, rho_N * pull_N) * weight_N * logprobs_N
    return make_loss(
        scores,
        row,
        ratios,
        loss_N,
        unit=unit,
        low_N=low_N,
        high_N=high_N,
        masked_N=masked_N,
        sequence_masked_low=sequence_low_S,
        sequence_masked_high=sequence_high_S,
        geo_masked_low=geo_low_S,
        geo_masked_high=geo_high_S,
        geo_seq_ratio=geo_S,
        **teacher_values,
    )


def grpo_loss(scores: TokenScores, row: RowTensors, *, config: GrpoLossConfig) -> RowLoss:
    """Compute minus the sum of min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A), with gradient where the minimum has one.

    `normalization` selects the divisor of the sum. With `sample`, tokens of long samples weigh less than tokens of short samples,
    a bias that Dr. GRPO removes with a constant length.

    Bias: unbiased on policy up to that weighting. Off policy, the ratios of earlier tokens are left out and clipped tokens
    have no gradient.

    Source: GRPO, arXiv 2402.03300, equation 3; token normalization and a higher upper clip: DAPO, arXiv 2503.14476, equation 8;
    constant normalization: Dr. GRPO, arXiv 2503.20783, section 3.2.
    """
    ratios = make_ratios(scores, row)
    ratio_N = (scores.logprobs_N - row.sampler_logprobs_N).clamp(max=MAX_LOG_RATIO).exp()
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    objective_N, low_N, high_N = clip_objective(ratio_N, row.advantages_N, low=low, high=high)
    loss_N, unit = normalise(-objective_N, row, ratios, config)
    return make_loss(scores, row, ratios, loss_N, unit=unit, low_N=low_N, high_N=high_N)


def sapo_loss(scores: TokenScores, row: RowTensors, *, config: SapoLossConfig) -> RowLoss:
    """Compute minus the sum of 4 / tau * sigmoid(tau * (r - 1)) * A, tau = tau_pos where A > 0, else tau_neg.

    The gradient of a token is weighted by 4 * sigmoid * (1 - sigmoid), which is 1 at r = 1 and falls smoothly on both sides.

    Bias: on policy as `grpo_loss` with the same normalization. Off policy, ratios of earlier tokens are left out, and the gate
    biases towards the sampling policy. No token is masked.

    Source: SAPO, arXiv 2511.20347, equations 5 and 6.
    """
    ratios = make_ratios(scores, row)
    ratio_N = (scores.logprobs_N - row.sampler_logprobs_N).clamp(max=MAX_LOG_RATIO).exp()
    is_up_N = (row.advantages_N > 0).to(ratio_N.dtype)
    tau_N = is_up_N * config.tau_pos + (1.0 - is_up_N) * config.tau_neg
    gated_N = 4.0 / tau_N * torch.sigmoid(tau_N * (ratio_N - 1.0)) * row.advantages_N
    loss_N, unit = normalise(-gated_N, row, ratios, config)
    none_N = torch.zeros_like(ratio_N, dtype=torch.bool)
    return make_loss(scores, row, ratios, loss_N, unit=unit, low_N=none_N, high_N=none_N)


def cov_loss(scores: TokenScores, row: RowTensors, *, config: ClipCovLossConfig | KlCovLossConfig) -> RowLoss:
    """Compute a sum over the step's loss tokens, some of which are chosen over the whole step.

    `clip_cov`: - sum of min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) over the tokens that are not chosen; chosen ones count
    in the divisor. `kl_cov`: - sum of r * A, plus kl_coef * |d| on the chosen tokens.

    Bias: `clip_cov` as `grpo_loss`, and without the chosen tokens. `kl_cov` is unbiased where d is exactly 0; a d of rounding gives
    a chosen token a penalty of either sign. Off policy, ratios of earlier tokens are left out, and the penalty pulls towards the
    sampling policy.

    Source: arXiv 2505.22617, section 4.2.
    """
    assert row.chosen_N is not None, "the step chooses tokens for this loss"
    d_N = scores.logprobs_N - row.sampler_logprobs_N
    ratio_N = d_N.clamp(max=MAX_LOG_RATIO).exp()
    low_N = high_N = masked_N = torch.zeros_like(row.chosen_N)
    if isinstance(config, ClipCovLossConfig):
        low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
        objective_N, low_N, high_N = clip_objective(ratio_N, row.advantages_N, low=low, high=high)
        loss_N, masked_N = -torch.where(row.chosen_N, 0.0, objective_N), low_N | high_N | row.chosen_N
    else:
        loss_N = -ratio_N * row.advantages_N + torch.where(row.chosen_N, config.kl_coef * d_N.abs(), 0.0)
    return make_loss(scores, row, make_ratios(scores, row), loss_N, low_N=low_N, high_N=high_N, masked_N=masked_N)


def cispo_loss(scores: TokenScores, row: RowTensors, *, config: CispoLossConfig) -> RowLoss:
    """Compute minus the sum of sg(clip(r, 1 - clip_low, 1 + clip_high)) * A * logprob, over the step's loss tokens.

    Bias: unbiased on policy. Off policy it is biased by the ratios of earlier tokens, which are left out, and by the clip;
    unlike with PPO every token keeps a gradient.

    Source: MiniMax-M1, arXiv 2506.13585, equations 4 and 5.
    """
    return _weighted_loss(scores, row, low=1.0 - config.clip_low, high=1.0 + config.clip_high)


def aipo_loss(scores: TokenScores, row: RowTensors, *, config: AipoLossConfig) -> RowLoss:
    """Compute minus the sum of sg(min(r, clip_ratio)) * A * logprob, over the step's loss tokens.

    Bias: as `cispo_loss` without a lower bound; the truncation from above is that of V-trace and bounds the variance.

    Source: AIPO, LlamaRL, arXiv 2505.24034, section 6.
    """
    return _weighted_loss(scores, row, low=0.0, high=config.clip_ratio)


def _weighted_loss(scores: TokenScores, row: RowTensors, *, low: float, high: float) -> RowLoss:
    """Compute minus the sum of sg(clip(r, low, high)) * A * logprob, without any masked token."""
    ratios = make_ratios(scores, row)
    weight_N = ratios.ratio_N.clamp(min=low, max=high)
    loss_N = -weight_N * row.advantages_N * scores.logprobs_N
    none_N = torch.zeros_like(ratios.ratio_N, dtype=torch.bool)
    at_low_N, at_high_N = ratios.ratio_N < low, ratios.ratio_N > high
    return make_loss(scores, row, ratios, loss_N, low_N=at_low_N, high_N=at_high_N, masked_N=none_N)


def dppo_loss(scores: TokenScores, row: RowTensors, *, config: DppoLossConfig) -> RowLoss:
    """Compute the sum of -keep * adv_tau * A * r + kl_tau * d^2 over the step's loss tokens, with gradient through r and d.

    keep is false where p_trainer - p_sampler > dppo_mask_high and A > 0, or < -dppo_mask_low and A <= 0: the token's probability
    has already moved far in the direction of its advantage. The penalty acts on masked tokens too.

    Bias: unbiased on policy (where d = 0 the penalty has no gradient). Off policy, ratios of earlier tokens are left out,
    and the mask and the penalty bias towards the sampling policy.

    Source: prime-rl's default loss since 2026; DPPO, arXiv 2602.04879.
    """
    moved_N = scores.logprobs_N.detach().exp() - row.sampler_logprobs_N.exp()
    is_up_N = row.advantages_N > 0
    high_N = is_up_N & (moved_N > config.dppo_mask_high)
    low_N = ~is_up_N & (moved_N < -config.dppo_mask_low)
    return _masked_loss(scores, row, low_N=low_N, high_N=high_N, adv_tau=config.adv_tau, kl_tau=config.kl_tau)


def ipo_loss(scores: TokenScores, row: RowTensors, *, config: IpoLossConfig) -> RowLoss:
    """Compute the sum of -keep * adv_tau * A * r + kl_tau * d^2 over the step's loss tokens, with gradient through r and d.

    keep = |p_trainer - p_sampler| <= ipo_threshold, for either sign of A: in asynchronous training each batch is used once,
    and the sign does not predict where the policy has moved since.

    Bias: as `dppo_loss`.

    Source: prime-rl, March 2026.
    """
    moved_N = scores.logprobs_N.detach().exp() - row.sampler_logprobs_N.exp()
    high_N, low_N = moved_N > config.ipo_threshold, moved_N < -config.ipo_threshold
    return _masked_loss(scores, row, low_N=low_N, high_N=high_N, adv_tau=config.adv_tau, kl_tau=config.kl_tau)


def _masked_loss(
    scores: TokenScores, row: RowTensors, *, low_N: torch.Tensor, high_N: torch.Tensor, adv_tau: float, kl_tau: float
) -> RowLoss:
    """Compute the sum of -keep * adv_tau * A * r + kl_tau * d^2, where keep is false for tokens of `low_N` and `high_N`."""
    d_N = scores.logprobs_N - row.sampler_logprobs_N
    gain_N = torch.where(low_N | high_N, 0.0, adv_tau * row.advantages_N) * d_N.clamp(max=MAX_LOG_RATIO).exp()
    loss_N = -gain_N + kl_tau * d_N.square()
    return make_loss(scores, row, make_ratios(scores, row), loss_N, low_N=low_N, high_N=high_N)


_FORMULAS: dict[str, Callable[..., Any]] = {
    "default": default_loss,
    "cispo": cispo_loss,
    "aipo": aipo_loss,
    "grpo": grpo_loss,
    "gspo": gspo_loss,
    "dppo": dppo_loss,
    "ipo": ipo_loss,
    "luspo": gspo_loss,
    "gmpo": gmpo_loss,
    "sapo": sapo_loss,
    "vespo": vespo_loss,
    "clip_cov": cov_loss,
    "kl_cov": cov_loss,
    "importance": corrected_loss,
    "decoupled": corrected_loss,
}
"""The function of each `trainer.loss.type`."""


def make_policy_loss(config: LossConfig) -> Loss:
    """Return the loss that `config` selects, with its regularization."""
    is_custom = isinstance(config, CustomLossConfig)
    return _regularize(load_custom_loss(config) if is_custom else partial(_FORMULAS[config.type], config=config), config)


def _regularize(loss: Loss, config: PolicyLossConfig) -> Loss:
    """Return `loss` plus beta * KL(policy || reference) minus entropy_coef * entropy, both per loss token of the step.

    The divergence is estimated on the sampled tokens by k3, exp(q) - q - 1 with q = reference - trainer log-probability: on
    policy its mean is KL(policy || reference) of the next token. As in GRPO the estimate itself is differentiated. On policy this
    gives the gradient of KL(reference || policy), which is equal to first order in q. A token's effect on later tokens is left out.
    The entropy of each next token is exact; its gradient leaves out the same effect.

    Source: GRPO, arXiv 2402.03300, equation 4.
    """
    if not config.beta and not config.entropy_coef:
        return loss

    def compute(scores: TokenScores, row: RowTensors) -> RowLoss:
        terms, values, tokens = loss(scores, row)
        added = torch.zeros_like(scores.logprobs_N)
        if config.beta:
            assert row.reference_logprobs_N is not None, "the step scores the reference when beta is set"
            q_N = row.reference_logprobs_N - scores.logprobs_N
            kl_N = torch.expm1(q_N) - q_N
            added = added + config.beta * kl_N
            values = {**values, "ref_kl": kl_N.detach()}
        if config.entropy_coef:
            added = added - config.entropy_coef * scores.entropies_N
        token_term = terms.get(LossUnit.TOKEN, torch.zeros((), device=added.device)) + added.sum()
        token_N = tokens.get(LossUnit.TOKEN, torch.zeros_like(added)) + added.detach()
        return RowLoss({**terms, LossUnit.TOKEN: token_term}, values, {**tokens, LossUnit.TOKEN: token_N})

    return compute


def cross_entropy(scores: TokenScores, row: RowTensors) -> RowLoss:
    """Compute minus the log-probability of each loss token: the loss of supervised fine-tuning."""
    loss_N = -scores.logprobs_N
    values: dict[str, torch.Tensor | Selected] = {"loss": loss_N.detach(), "entropy": scores.entropies_N.detach()}
    return RowLoss({LossUnit.TOKEN: loss_N.sum()}, values, {LossUnit.TOKEN: loss_N.detach()})
