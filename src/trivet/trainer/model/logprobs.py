"""Scores tokens with a language-model head, a chunk at a time, so that all logits never exist at once.

Called by `trainer.model.policy_model`. The computation between the matrix products takes ten passes over the logits. Compiled, it
takes two in the forward pass and two in the backward pass. A CPU makes these passes for a few tokens at a time, whose logits stay
in the cache of a core. On a GPU the matrix product gives float32 logits, where torch and the GPU can do that. Nothing here may read
a tensor's value on the host, because the host would wait for the GPU.

Legend: N tokens to score, C tokens of one chunk, R tokens of one tile (`_tiles`), H hidden size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

_CACHED_LOGITS = 1 << 18
"""Float32 logits of one tile on a CPU; other values of the computation need as much memory again. Of the sizes tried this one was
the fastest, or close to it, with 2 MiB of cache a core."""
_FIRST_WITH_BF16 = (8, 0)
"""Compute capability of the first GPUs that multiply bfloat16."""


class TokenScores(NamedTuple):
    """The scores of a row's loss tokens."""

    logprobs_N: torch.Tensor
    """float32: log-probability of each target, temperature applied."""
    entropies_N: torch.Tensor
    """float32, nats: entropy of the same distribution. The backward pass computes nothing for it unless the loss uses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitForm:
    """Options of the computation that makes logits of the head's product, and of its gradient."""

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
        outputs_RV: the head's product; in eager mode its memory is overwritten if it is float32 or float64.
        targets_R: int64.
        temperatures_R: float32, > 0.
    """
    logits_RV = _logits(outputs_RV, temperatures_R, form)
    target_logits_R = logits_RV.gather(1, targets_R[:, None])[:, 0]
    # Log(sum(exp(logits))) and the mean of the logits under softmax(logits), in as few passes as possible. The entropy is their
    # difference: it is exact to the rounding of a logit, as the log-probabilities are.
    largest_R1 = logits_RV.amax(dim=-1, keepdim=True)
    shifted_RV = logits_RV.sub_(largest_R1)
    weights_RV = shifted_RV.exp()
    totals_R = weights_RV.sum(dim=-1)
    mean_logits_R = weights_RV.mul_(shifted_RV).sum(dim=-1) / totals_R + largest_R1[:, 0]
    log_totals_R = totals_R.log() + largest_R1[:, 0]
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
        outputs_RV, targets_R, temperatures_R: as in `score_logits`, which returned `log_totals_R` and `entropies_R`.
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
        # -p * (scale + bonus * (log p + H)): the gradients of -logsumexp and of the entropy with respect to the logits.
        bonus_R1 = (grad_entropies_R / temperatures_R)[:, None]
        probabilities_RV = logprobs_RV.exp()
        grad_RV = logprobs_RV.add_(entropies_R[:, None]).mul_(bonus_R1).add_(scale_R1).mul_(probabilities_RV).neg_()
    if torch.compiler.is_compiling():
        # A scatter would be a kernel of its own, before and after which all gradients go through memory.
        is_target_RV = torch.arange(grad_RV.shape[1], device=grad_RV.device) == targets_R[:, None]
        grad_RV = torch.where(is_target_RV, grad_RV + scale_R1, grad_RV)
    else:
        grad_RV = grad_RV.scatter_add_(1, targets_R[:, None], scale_R1)
    if slope_RV is not None:
        grad_RV = grad_RV.mul_(slope_RV)
    return grad_RV if form.grad_dtype is None else grad_RV.to(form.grad_dtype)


@cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` to one graph, when it first runs, for chunks of any number of tokens."""
    compiled = torch.compile(function, dynamic=True)

    def run(outputs_RV: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # The last chunk of a row has fewer tokens than the others. The vocabulary has a fixed size, which makes better kernels.
        torch._dynamo.mark_static(outputs_RV, 1)
        return compiled(outputs_RV, *args, **kwargs)

    return run


def score_tokens(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    *,
    targets_N: torch.Tensor,
    temperatures_N: torch.Tensor,
    chunk_size: int,
    uses_temperatures: bool = True,
    softcap: float | None = None,
    is_compiled: bool = False,
) -> TokenScores:
    """Score `targets_N` under softmax(logits / temperature), logits = hidden @ weight.T, capped to +-softcap.

    The matrix products multiply in the dtype of `hidden_NH`. Everything after them is float32 (float64 for float64 input). The
    products' results, logits and the weight's gradient, have the dtype that `choose_product_dtype` returns.

    Args:
        weight_VH: may have a wider dtype than `hidden_NH`; its gradient gets the dtype of the weight.
        targets_N: int64.
        temperatures_N: float32, > 0.
        chunk_size: tokens whose logits exist at one time.
        uses_temperatures: false when every temperature is 1. It is an argument because reading the tensor would wait for the GPU.
        is_compiled: compile the computation between the matrix products when it first runs.
    """
    uses_tiles = hidden_NH.device.type == "cpu" and not is_compiled
    head = _Head(
        chunk_size=chunk_size,
        uses_tiles=uses_tiles,
        form=LogitForm(
            softcap=softcap, uses_temperatures=uses_temperatures, grad_dtype=None if uses_tiles else hidden_NH.dtype
        ),
        score=_compile(score_logits) if is_compiled else score_logits,
        differentiate=_compile(differentiate_scores) if is_compiled else differentiate_scores,
        product_dtype=_product_dtype(hidden_NH.device, hidden_NH.dtype),
    )
    logprobs_N, entropies_N = _ChunkedHead.apply(hidden_NH, weight_VH, targets_N, temperatures_N, head)
    return TokenScores(logprobs_N, entropies_N)


def choose_product_dtype(
    dtype: torch.dtype, *, device_type: str, capability: tuple[int, int] | None, has_wide_products: bool
) -> torch.dtype:
    """Choose the dtype of the result of a matrix product of `dtype`: float32 where the product can give it, else `dtype`.

    Rounding logits to bfloat16 moves log-probabilities by about 0.02.

    Args:
        capability: compute capability of a CUDA device; None for other devices.
        has_wide_products: the result of torch's product can have another dtype than its factors.
    """
    is_possible = device_type == "cuda" and capability is not None and capability >= _FIRST_WITH_BF16 and has_wide_products
    return torch.float32 if is_possible and dtype == torch.bfloat16 else dtype


@cache
def _product_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    return choose_product_dtype(
        dtype,
        device_type=device.type,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        has_wide_products=torch.version.hip is None and "dtype" in torch.ops.aten.mm.overloads(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """The options of one call of `score_tokens`, for its forward and its backward pass."""

    chunk_size: int
    uses_tiles: bool
    """True: a chunk is computed in tiles of a few tokens. A GPU and compiled code gain nothing from tiles."""
    form: LogitForm
    score: Callable[..., Any]
    differentiate: Callable[..., Any]
    product_dtype: torch.dtype


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        master_VH: torch.Tensor,
        targets_N: torch.Tensor,
        temperatures_N: torch.Tensor,
        head: _Head,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weight_VH = master_VH.to(hidden_NH.dtype)
        ctx.master_dtype = master_VH.dtype
        scores: list[tuple[torch.Tensor, ...]] = []
        for hidden_CH, *values_C in _chunks(hidden_NH, targets_N, temperatures_N, size=head.chunk_size):
            outputs_CV = _multiply(hidden_CH, weight_VH.T, dtype=head.product_dtype)
            for tile in _tiles(head, outputs_CV, *values_C):
                scores.append(head.score(*tile, form=head.form))
        logprobs_N, entropies_N, log_totals_N = (torch.cat(parts) for parts in zip(*scores, strict=True))
        ctx.save_for_backward(hidden_NH, weight_VH, targets_N, temperatures_N, log_totals_N, entropies_N)
        ctx.head = head
        ctx.set_materialize_grads(False)
        return logprobs_N, entropies_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden_NH, weight_VH, targets_N, temperatures_N, log_totals_N, entropies_N = ctx.saved_tensors
        head: _Head = ctx.head
        grad_logprobs_N = torch.zeros_like(log_totals_N) if grads[0] is None else grads[0]
        grad_weight_VH: torch.Tensor | None = None
        grad_hidden = []
        values_N = [hidden_NH, targets_N, temperatures_N, log_totals_N, entropies_N, grad_logprobs_N]
        if grads[1] is not None:
            values_N.append(grads[1])
        for hidden_CH, *values_C in _chunks(*values_N, size=head.chunk_size):
            outputs_CV = _multiply(hidden_CH, weight_VH.T, dtype=head.product_dtype)
            if not head.uses_tiles:
                grad_outputs_CV = head.differentiate(outputs_CV, *values_C, form=head.form)
            else:
                is_same = outputs_CV.dtype == hidden_CH.dtype
                grad_outputs_CV = outputs_CV if is_same else torch.empty_like(outputs_CV, dtype=hidden_CH.dtype)
                for grad_RV, *tile in _tiles(head, grad_outputs_CV, outputs_CV, *values_C):
                    grad_RV.copy_(head.differentiate(*tile, form=head.form))
            grad_hidden.append(grad_outputs_CV @ weight_VH)
            if not ctx.needs_input_grad[1]:
                continue
            part_VH = _multiply(grad_outputs_CV.T, hidden_CH, dtype=head.product_dtype)
            if len(hidden_CH) < len(hidden_NH):  # the products of several chunks are summed in float32
                part_VH = part_VH.to(log_totals_N.dtype)
            grad_weight_VH = part_VH if grad_weight_VH is None else grad_weight_VH.add_(part_VH)
        grad_master_VH = None if grad_weight_VH is None else grad_weight_VH.to(ctx.master_dtype)
        return torch.cat(grad_hidden), grad_master_VH, None, None, None


def _multiply(left: torch.Tensor, right: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    return left @ right if dtype == left.dtype else torch.mm(left, right, out_dtype=dtype)


def _chunks(*tensors: torch.Tensor, size: int) -> Any:
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)


def _tiles(head: _Head, outputs_CV: torch.Tensor, *values_C: torch.Tensor) -> Any:
    """Split a chunk into tiles: as many tokens as have `_CACHED_LOGITS` logits, or the whole chunk if the head uses no tiles."""
    num_tokens, vocab_size = outputs_CV.shape
    num_cached = max(1, _CACHED_LOGITS // vocab_size)
    return _chunks(outputs_CV, *values_C, size=num_cached if head.uses_tiles else num_tokens)


def _logits(outputs_RV: torch.Tensor, temperatures_R: torch.Tensor, form: LogitForm) -> torch.Tensor:
    """Return the float32 or float64 logits. In eager mode they may overwrite `outputs_RV`."""
    dtype = torch.promote_types(outputs_RV.dtype, torch.float32)
    # A compiled graph that changed its input would write the input back to memory, so it gets a copy.
    wide_RV = outputs_RV.to(dtype, copy=torch.compiler.is_compiling())
    if form.softcap is not None:
        wide_RV = wide_RV.div_(form.softcap).tanh_().mul_(form.softcap)
    return wide_RV.div_(temperatures_R[:, None]) if form.uses_temperatures else wide_RV
