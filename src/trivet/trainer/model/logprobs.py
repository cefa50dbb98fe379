"""Scores tokens with a language-model head, a chunk at a time, so that all logits never exist at once.

Called by `trainer.model.policy_model`. After the product with the head's weight come ten passes over the logits. On a CPU they are
made over a few tokens at a time, whose logits stay in the cache of a core; the float32 logits of a whole chunk would go to memory
and back in each pass.

Legend: N tokens to score, C tokens of one chunk, R tokens whose logits are worked on at one time, H hidden size, V vocabulary.
"""

from typing import Any, NamedTuple

import torch

from trivet.trainer.optim.master_weights import MasterWeights

_CACHED_LOGITS = 1 << 18
"""Float32 logits worked on at one time on a CPU, with as many values beside them: of the sizes tried the fastest with 2 MiB of
cache a core, or close to it."""


class TokenScores(NamedTuple):
    """The scores of a row's loss tokens."""

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
    masters: MasterWeights | None = None,
) -> TokenScores:
    """Score `targets_N` under softmax(logits / temperature), logits = hidden @ weight.T.

    The matrix products run in the dtype of `hidden_NH`, everything after them in float32 (float64 for float64 input).

    Args:
        weight_VH: may be wider than `hidden_NH`; its gradient has its own dtype.
        targets_N: int64.
        temperatures_N: float32, > 0.
        chunk_size: tokens whose logits exist at one time.
        softcap: logits are softcap * tanh(hidden @ weight.T / softcap).
        masters: casts the weight and takes its gradient, where that is not left to autograd.
    """
    masters = masters or MasterWeights()
    logprobs_N, entropies_N = _ChunkedHead.apply(hidden_NH, weight_VH, masters, targets_N, temperatures_N, chunk_size, softcap)
    return TokenScores(logprobs_N, entropies_N)


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        master_VH: torch.Tensor,
        masters: MasterWeights,
        targets_N: torch.Tensor,
        temperatures_N: torch.Tensor,
        chunk_size: int,
        softcap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weight_VH = masters.of(master_VH, hidden_NH.dtype)
        ctx.master, ctx.masters = master_VH, masters
        logprobs, entropies, log_totals = [], [], []
        for hidden_CH, targets_C, temperatures_C in _chunks(hidden_NH, targets_N, temperatures_N, size=chunk_size):
            outputs_CV = hidden_CH @ weight_VH.T
            for outputs_RV, targets_R, temperatures_R in _tiles(outputs_CV, targets_C, temperatures_C):
                logits_RV = _logits(outputs_RV, temperatures_R, softcap=softcap)
                of_targets_R = logits_RV.gather(1, targets_R[:, None])[:, 0]
                log_totals_R, mean_logits_R = _summarize(logits_RV)
                log_totals.append(log_totals_R)
                logprobs.append(of_targets_R - log_totals_R)
                entropies.append(log_totals_R - mean_logits_R)
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
        chunks = _chunks(
            hidden_NH,
            targets_N,
            temperatures_N,
            log_totals_N,
            grad_logprobs_N,
            entropies_N,
            torch.zeros_like(entropies_N) if grad_entropies_N is None else grad_entropies_N,
            size=ctx.chunk_size,
        )
        for hidden_CH, *of_tokens_C in chunks:
            grad_logits_CV = hidden_CH @ weight_VH.T  # outputs first, and tile by tile their gradient
            for tile in _tiles(grad_logits_CV, *of_tokens_C):
                outputs_RV, targets_R, temperatures_R, log_totals_R, grad_R, entropies_R, grad_entropies_R = tile
                scale_R1 = (grad_R / temperatures_R)[:, None]
                logits_RV = _logits(outputs_RV, temperatures_R, softcap=ctx.softcap)
                slope_RV = None if ctx.softcap is None else 1.0 - (logits_RV * (temperatures_R[:, None] / ctx.softcap)).square()
                logprobs_RV = logits_RV.sub_(log_totals_R[:, None])
                if grad_entropies_N is None:
                    grad_RV = logprobs_RV.exp_().mul_(-scale_R1)
                else:
                    bonus_R1 = (grad_entropies_R / temperatures_R)[:, None]
                    grad_RV = _mix(logprobs_RV, entropies_R, scale_R1=scale_R1, bonus_R1=bonus_R1)
                grad_RV.scatter_add_(1, targets_R[:, None], scale_R1)
                outputs_RV.copy_(grad_RV if slope_RV is None else grad_RV.mul_(slope_RV))
            grad_hidden.append(grad_logits_CV @ weight_VH)
            if not ctx.needs_input_grad[1]:
                continue
            part_VH = grad_logits_CV.T @ hidden_CH
            if ctx.masters.sums_gradients:
                ctx.masters.add_gradient(ctx.master, part_VH)
                continue
            part_VH = part_VH.to(log_totals_N.dtype)
            grad_weight_VH = part_VH if grad_weight_VH is None else grad_weight_VH.add_(part_VH)
        grad_master_VH = None if grad_weight_VH is None else grad_weight_VH.to(ctx.master.dtype)
        return torch.cat(grad_hidden), grad_master_VH, None, None, None, None, None


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


def _logits(outputs_RV: torch.Tensor, temperatures_R: torch.Tensor, *, softcap: float | None) -> torch.Tensor:
    """Return the float32 or float64 logits; they may be `outputs_RV` itself, changed."""
    wide_RV = outputs_RV if outputs_RV.dtype == torch.float64 else outputs_RV.float()
    if softcap is not None:
        wide_RV = wide_RV.div_(softcap).tanh_().mul_(softcap)
    return wide_RV if bool((temperatures_R == 1).all()) else wide_RV.div_(temperatures_R[:, None])


def _chunks(*tensors: torch.Tensor, size: int) -> Any:
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)


def _tiles(outputs_CV: torch.Tensor, *of_tokens_C: torch.Tensor) -> Any:
    """Split a chunk into the tokens that are worked on at one time; on a GPU that is the whole chunk."""
    num_tokens, vocab_size = outputs_CV.shape
    num_cached = max(1, _CACHED_LOGITS // vocab_size)
    return _chunks(outputs_CV, *of_tokens_C, size=num_cached if outputs_CV.device.type == "cpu" else num_tokens)
