"""Log-probabilities and entropies from a language-model head, a chunk of tokens at a time: all logits never exist at once.

Legend: N tokens to score, C tokens of one chunk, H hidden size, V vocabulary.
"""

from typing import Any, NamedTuple

import torch


class TokenScores(NamedTuple):
    logprobs_N: torch.Tensor
    """float32: log-probability of each target, temperature applied."""
    entropies_N: torch.Tensor
    """float32, nats, of the same distribution; costs nothing in the backward pass unless the loss uses it."""


def score_tokens(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    *,
    targets_N: torch.Tensor,
    temperatures_N: torch.Tensor,
    chunk_size: int,
    softcap: float | None = None,
    cast_VH: torch.Tensor | None = None,
) -> TokenScores:
    """Score `targets_N` under softmax(logits / temperature), logits = hidden @ weight.T.

    The matrix products run in the dtype of `hidden_NH`, everything after them in float32 (float64 for float64 input).

    Args:
        weight_VH: may be wider than `hidden_NH`; its gradient has its own dtype.
        targets_N: int64.
        temperatures_N: float32, > 0.
        chunk_size: tokens whose logits exist at one time.
        softcap: logits are softcap * tanh(hidden @ weight.T / softcap).
        cast_VH: the weight in the dtype of `hidden_NH`, where that is at hand.
    """
    cast_VH = weight_VH.detach().to(hidden_NH.dtype) if cast_VH is None else cast_VH
    logprobs_N, entropies_N = _ChunkedHead.apply(hidden_NH, weight_VH, cast_VH, targets_N, temperatures_N, chunk_size, softcap)
    return TokenScores(logprobs_N, entropies_N)


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        master_VH: torch.Tensor,
        weight_VH: torch.Tensor,
        targets_N: torch.Tensor,
        temperatures_N: torch.Tensor,
        chunk_size: int,
        softcap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.dtype = master_VH.dtype
        logprobs, entropies, log_totals = [], [], []
        for hidden_CH, targets_C, temperatures_C in _chunks(hidden_NH, targets_N, temperatures_N, chunk_size=chunk_size):
            logits_CV = _logits(hidden_CH, weight_VH, temperatures_C, softcap=softcap)
            of_targets_C = logits_CV.gather(1, targets_C[:, None])[:, 0]
            log_totals_C, mean_logits_C = _summarize(logits_CV)
            log_totals.append(log_totals_C)
            logprobs.append(of_targets_C - log_totals_C)
            entropies.append(log_totals_C - mean_logits_C)
        entropies_N = torch.cat(entropies)
        ctx.save_for_backward(hidden_NH, weight_VH, targets_N, temperatures_N, torch.cat(log_totals), entropies_N)
        ctx.chunk_size = chunk_size
        ctx.softcap = softcap
        ctx.set_materialize_grads(False)
        return torch.cat(logprobs), entropies_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden_NH, weight_VH, targets_N, temperatures_N, log_totals_N, entropies_N = ctx.saved_tensors
        grad_logprobs_N = torch.zeros_like(log_totals_N) if grads[0] is None else grads[0]
        grad_entropies_N = grads[1]
        grad_weight_VH: torch.Tensor | None = None
        grad_hidden = []
        place = 0
        chunks = _chunks(hidden_NH, targets_N, temperatures_N, log_totals_N, grad_logprobs_N, chunk_size=ctx.chunk_size)
        for hidden_CH, targets_C, temperatures_C, log_totals_C, grad_C in chunks:
            scale_C1 = (grad_C / temperatures_C)[:, None]
            logits_CV = _logits(hidden_CH, weight_VH, temperatures_C, softcap=ctx.softcap)
            slope_CV = None if ctx.softcap is None else 1.0 - (logits_CV * (temperatures_C[:, None] / ctx.softcap)).square()
            logprobs_CV = logits_CV.sub_(log_totals_C[:, None])
            if grad_entropies_N is None:
                grad_logits_CV = logprobs_CV.exp_().mul_(-scale_C1)
            else:
                chunk = slice(place, place := place + len(grad_C))
                bonus_C1 = (grad_entropies_N[chunk] / temperatures_C)[:, None]
                grad_logits_CV = _mix(logprobs_CV, entropies_N[chunk], scale_C1=scale_C1, bonus_C1=bonus_C1)
            grad_logits_CV.scatter_add_(1, targets_C[:, None], scale_C1)
            if slope_CV is not None:
                grad_logits_CV.mul_(slope_CV)
            grad_logits_CV = grad_logits_CV.to(weight_VH.dtype)
            grad_hidden.append(grad_logits_CV @ weight_VH)
            part_VH = (grad_logits_CV.T @ hidden_CH).to(log_totals_N.dtype)
            grad_weight_VH = part_VH if grad_weight_VH is None else grad_weight_VH.add_(part_VH)
        assert grad_weight_VH is not None
        return torch.cat(grad_hidden), grad_weight_VH.to(ctx.dtype), None, None, None, None, None


def _summarize(logits_CV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """log(sum(exp(logits))) and the mean of the logits under softmax(logits), in as few passes as there can be.

    Entropy is the one less the other: it is exact to the rounding of a logit, as the log-probabilities are.
    """
    largest_C1 = logits_CV.amax(dim=-1, keepdim=True)
    shifted_CV = logits_CV.sub_(largest_C1)
    weights_CV = shifted_CV.exp()
    totals_C = weights_CV.sum(dim=-1)
    means_C = weights_CV.mul_(shifted_CV).sum(dim=-1) / totals_C
    return totals_C.log() + largest_C1[:, 0], means_C + largest_C1[:, 0]


def _mix(
    logprobs_CV: torch.Tensor, entropies_C: torch.Tensor, *, scale_C1: torch.Tensor, bonus_C1: torch.Tensor
) -> torch.Tensor:
    """-p * (scale + bonus * (log p + H)): the gradients of -logsumexp and of the entropy with respect to the logits."""
    probabilities_CV = logprobs_CV.exp()
    return logprobs_CV.add_(entropies_C[:, None]).mul_(bonus_C1).add_(scale_C1).mul_(probabilities_CV).neg_()


def _logits(
    hidden_CH: torch.Tensor, weight_VH: torch.Tensor, temperatures_C: torch.Tensor, *, softcap: float | None
) -> torch.Tensor:
    logits_CV = hidden_CH @ weight_VH.T
    wide = logits_CV if logits_CV.dtype == torch.float64 else logits_CV.float()
    if softcap is not None:
        wide = wide.div_(softcap).tanh_().mul_(softcap)
    return wide if bool((temperatures_C == 1).all()) else wide.div_(temperatures_C[:, None])


def _chunks(*tensors: torch.Tensor, chunk_size: int) -> Any:
    return zip(*(tensor.split(chunk_size) for tensor in tensors), strict=True)
