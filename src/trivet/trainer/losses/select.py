"""Makes the loss function that the step calls, as `[trainer.loss]` configures it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from trivet.config.schema.trainer import CustomLossConfig, LossConfig, PolicyLossConfig
from trivet.trainer.losses import formulas
from trivet.trainer.losses.custom import load_custom_loss
from trivet.trainer.losses.terms import Loss, LossUnit, RowLoss
from trivet.trainer.model.logprobs import TokenScores
from trivet.trainer.rows import RowTensors

_FORMULAS: dict[str, Callable[..., Any]] = {
    "default": formulas.default_loss,
    "cispo": formulas.cispo_loss,
    "aipo": formulas.aipo_loss,
    "grpo": formulas.grpo_loss,
    "gspo": formulas.gspo_loss,
    "dppo": formulas.dppo_loss,
    "ipo": formulas.ipo_loss,
}
"""The function of each `trainer.loss.type`."""


def make_policy_loss(config: LossConfig) -> Loss:
    """Return the loss that `config` selects, with its regularization."""
    if isinstance(config, CustomLossConfig):
        return _regularize(load_custom_loss(config), config)
    return _regularize(partial(_FORMULAS[config.type], config=config), config)


def _regularize(loss: Loss, config: PolicyLossConfig) -> Loss:
    """Return `loss` plus beta * KL(policy || reference) minus entropy_coef * entropy, both per loss token of the step.

    The divergence is estimated on the sampled tokens by k3, exp(q) - q - 1 with q = reference - trainer log-probability: on
    policy its mean is KL(policy || reference) of the next token. As in GRPO it is differentiated as it stands, which on policy
    gives the gradient of KL(reference || policy) instead, equal to the other to first order in q; what earlier tokens do to
    later states is left out. The entropy is exact for each next token, with the same omission.

    Source: GRPO, arXiv 2402.03300, equation 4.
    """
    if not config.beta and not config.entropy_coef:
        return loss

    def compute(scores: TokenScores, row: RowTensors) -> RowLoss:
        terms, values = loss(scores, row)
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
        return RowLoss({**terms, LossUnit.TOKEN: token_term}, values)

    return compute


def cross_entropy(scores: TokenScores, row: RowTensors) -> RowLoss:
    """Compute - log-probability of each loss token: the loss of supervised fine-tuning."""
    loss_N = -scores.logprobs_N
    return RowLoss({LossUnit.TOKEN: loss_N.sum()}, {"loss": loss_N.detach(), "entropy": scores.entropies_N.detach()})
