"""Computes what lies between the head's matrix products: scores from logits, and the logits' gradient from that of the scores.

Called by `trainer.model.logprobs` for each chunk of tokens. Eagerly these are ten passes over the logits. Compiled they are two in
each direction. Nothing here may ask a tensor for a value: a GPU would have to finish first.

Legend: R tokens whose logits are worked on at one time, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitForm:
    """How the head's product becomes logits."""

    softcap: float | None
    """Logits are softcap * tanh(output / softcap), before temperatures."""
    uses_temperatures: bool
    """Logits are divided by temperatures."""
    grad_dtype: torch.dtype | None = None
    """Dtype of the gradient of the product; None: that in which it is computed, float32 or float64."""


def score_logits(
    outputs_RV: torch.Tensor, targets_R: torch.Tensor, temperatures_R: torch.Tensor, *, form: LogitForm
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probabilities of the targets, entropies, and log(sum(exp(logits))), each [R], of softmax(logits).

    Args:
        outputs_RV: the head's product; eagerly it may be changed.
        targets_R: int64.
        temperatures_R: float32, > 0.
    """
    logits_RV = _logits(outputs_RV, temperatures_R, form)
    target_logits_R = logits_RV.gather(1, targets_R[:, None])[:, 0]
    log_totals_R, mean_logits_R = _summarize(logits_RV)
    return target_logits_R - log_totals_R, log_totals_R - mean_logits_R, log_totals_R


def differentiate_scores(
    outputs_RV: torch.Tensor,
    targets_R: torch.Tensor,
    temperatures_R: torch.Tensor,
    log_totals_R: torch.Tensor,
    entropies_R: torch.Tensor,
    grad_logprobs_R: torch.Tensor,
    grad_entropies_R: torch.Tensor | None = None,
    *,
    form: LogitForm,
) -> torch.Tensor:
    """Return the gradient with respect to `outputs_RV`, [R, V].

    Args:
        outputs_RV, targets_R, temperatures_R: as in `score_logits`.
        log_totals_R, entropies_R: what `score_logits` returned.
        grad_logprobs_R, grad_entropies_R: the gradients with respect to the scores; None: the loss uses no entropies.
    """
    scale_R1 = (grad_logprobs_R / temperatures_R)[:, None]
    logits_RV = _logits(outputs_RV, temperatures_R, form)
    slope_RV = None
    if form.softcap is not None:
        slope_RV = 1.0 - (logits_RV * (temperatures_R[:, None] / form.softcap)).square()
    logprobs_RV = logits_RV.sub_(log_totals_R[:, None])
    if grad_entropies_R is None:
        grad_RV = logprobs_RV.exp_().mul_(-scale_R1)
    else:
        bonus_R1 = (grad_entropies_R / temperatures_R)[:, None]
        grad_RV = _mix(logprobs_RV, entropies_R, scale_R1=scale_R1, bonus_R1=bonus_R1)
    grad_RV = _add_to_targets(grad_RV, targets_R, scale_R1)
    if slope_RV is not None:
        grad_RV = grad_RV.mul_(slope_RV)
    return grad_RV if form.grad_dtype is None else grad_RV.to(form.grad_dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitArithmetic:
    """The two functions of this module, eager or compiled, for one model."""

    softcap: float | None = None
    """See `LogitForm`."""
    is_compiled: bool = False
    score: Callable[..., Any] = score_logits
    differentiate: Callable[..., Any] = differentiate_scores

    @classmethod
    def compiled(cls, *, softcap: float | None = None) -> "LogitArithmetic":
        """Compile each function to one graph, when it first runs, for chunks of any number of tokens."""
        score, differentiate = _compile(score_logits), _compile(differentiate_scores)
        return cls(softcap=softcap, is_compiled=True, score=score, differentiate=differentiate)


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch.compile(function, dynamic=True)

    def run(outputs_RV: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # The last chunk of a row has fewer tokens than the others. The vocabulary never changes: known, it makes better kernels.
        torch._dynamo.mark_static(outputs_RV, 1)
        return compiled(outputs_RV, *args, **kwargs)

    return run


def _logits(outputs_RV: torch.Tensor, temperatures_R: torch.Tensor, form: LogitForm) -> torch.Tensor:
    """Return the float32 or float64 logits. Eagerly they may be `outputs_RV` itself, changed."""
    dtype = torch.promote_types(outputs_RV.dtype, torch.float32)
    # A graph that changed its input would write it back to memory.
    wide_RV = outputs_RV.to(dtype, copy=torch.compiler.is_compiling())
    if form.softcap is not None:
        wide_RV = wide_RV.div_(form.softcap).tanh_().mul_(form.softcap)
    return wide_RV.div_(temperatures_R[:, None]) if form.uses_temperatures else wide_RV


def _summarize(logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log(sum(exp(logits))) and the mean of the logits under softmax(logits), in as few passes as possible.

    The entropy is their difference: it is exact to the rounding of a logit, as the log-probabilities are.
    """
    largest_R1 = logits_RV.amax(dim=-1, keepdim=True)
    shifted_RV = logits_RV.sub_(largest_R1)
    weights_RV = shifted_RV.exp()
    totals_R = weights_RV.sum(dim=-1)
    means_R = weights_RV.mul_(shifted_RV).sum(dim=-1) / totals_R
    return totals_R.log() + largest_R1[:, 0], means_R + largest_R1[:, 0]


def _mix(
    logprobs_RV: torch.Tensor, entropies_R: torch.Tensor, *, scale_R1: torch.Tensor, bonus_R1: torch.Tensor
) -> torch.Tensor:
    """Return -p * (scale + bonus * (log p + H)): the gradients of -logsumexp and of the entropy with respect to the logits."""
    probabilities_RV = logprobs_RV.exp()
    return logprobs_RV.add_(entropies_R[:, None]).mul_(bonus_R1).add_(scale_R1).mul_(probabilities_RV).neg_()


def _add_to_targets(grad_RV: torch.Tensor, targets_R: torch.Tensor, scale_R1: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling():
        # A scatter would be a kernel of its own, before and after which all gradients go through memory.
        is_target_RV = torch.arange(grad_RV.shape[1], device=grad_RV.device) == targets_R[:, None]
        return torch.where(is_target_RV, grad_RV + scale_R1, grad_RV)
    return grad_RV.scatter_add_(1, targets_R[:, None], scale_R1)
