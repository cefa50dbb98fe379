"""Makes the loss function that the step calls, as `[trainer.loss]` configures it."""

from functools import partial

from trivet.config.sections.losses import (
    AipoLossConfig,
    CispoLossConfig,
    CustomLossConfig,
    DefaultLossConfig,
    DppoLossConfig,
    GrpoLossConfig,
    GspoLossConfig,
    IpoLossConfig,
    LossConfig,
)
from trivet.trainer.losses.clipped import grpo_loss, gspo_loss
from trivet.trainer.losses.custom import load_custom_loss
from trivet.trainer.losses.default import default_loss
from trivet.trainer.losses.regularized import regularized
from trivet.trainer.losses.terms import Loss, LossUnit, RowLoss
from trivet.trainer.losses.trust_region import dppo_loss, ipo_loss
from trivet.trainer.losses.weighted import aipo_loss, cispo_loss
from trivet.trainer.model.logprobs import TokenScores
from trivet.trainer.rows import RowTensors


def make_policy_loss(config: LossConfig) -> Loss:
    """Return the loss that `config` selects, with its regularization.

    Raises:
        ConfigError: a custom loss cannot be imported.
    """
    return regularized(_select(config), config)


def _select(config: LossConfig) -> Loss:
    match config:
        case DefaultLossConfig():
            return partial(default_loss, config=config)
        case CispoLossConfig():
            return partial(cispo_loss, config=config)
        case AipoLossConfig():
            return partial(aipo_loss, config=config)
        case GrpoLossConfig():
            return partial(grpo_loss, config=config)
        case GspoLossConfig():
            return partial(gspo_loss, config=config)
        case DppoLossConfig():
            return partial(dppo_loss, config=config)
        case IpoLossConfig():
            return partial(ipo_loss, config=config)
        case CustomLossConfig():
            return load_custom_loss(config)


def cross_entropy(scores: TokenScores, row: RowTensors) -> RowLoss:
    """Compute - log-probability of each loss token: the loss of supervised fine-tuning."""
    loss_N = -scores.logprobs_N
    return RowLoss({LossUnit.TOKEN: loss_N.sum()}, {"loss": loss_N.detach(), "entropy": scores.entropies_N.detach()})
