"""Scores tokens with a language-model head, a chunk at a time, so that all logits never exist at once.

Called by `trainer.model.policy_model`. What comes after the product with the head's weight is in `trainer.model.logit_arithmetic`.
On a CPU it is done over a few tokens at a time, whose logits stay in the cache of a core; the float32 logits of a whole chunk would
go to memory and back in each pass. On a GPU the product itself gives float32 logits, where torch and the GPU can.

Legend: N tokens to score, C tokens of one chunk, R tokens whose logits are worked on at one time, H hidden size, V vocabulary.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from trivet.trainer.model.logit_arithmetic import LogitArithmetic, LogitForm
from trivet.trainer.optim.master_weights import MasterWeights

_CACHED_LOGITS = 1 << 18
"""Float32 logits worked on at one time on a CPU, with as many values beside them: of the sizes tried the fastest with 2 MiB of
cache a core, or close to it."""
_FIRST_WITH_BF16 = (8, 0)
"""Compute capability of the first GPUs that multiply bfloat16."""
_EAGER = LogitArithmetic()


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
    masters: MasterWeights | None = None,
    uses_temperatures: bool = True,
    arithmetic: LogitArithmetic = _EAGER,
) -> TokenScores:
    """Score `targets_N` under softmax(logits / temperature), logits = hidden @ weight.T, capped where `arithmetic` caps them.

    The matrix products multiply in the dtype of `hidden_NH`. Everything after them is float32 (float64 for float64 input), and so
    are the logits and the weight's gradient that they give where `choose_product_dtype` says so.

    Args:
        weight_VH: may be wider than `hidden_NH`; its gradient has its own dtype.
        targets_N: int64.
        temperatures_N: float32, > 0.
        chunk_size: tokens whose logits exist at one time.
        masters: casts the weight and takes its gradient, where that is not left to autograd.
        uses_temperatures: false when every temperature is 1. The caller knows; asking a tensor would wait for the GPU.
        arithmetic: computes everything after the products, eagerly or compiled.
    """
    masters = masters or MasterWeights()
    uses_tiles = hidden_NH.device.type == "cpu" and not arithmetic.is_compiled
    head = _Head(
        chunk_size=chunk_size,
        uses_tiles=uses_tiles,
        form=LogitForm(
            softcap=arithmetic.softcap, uses_temperatures=uses_temperatures, grad_dtype=None if uses_tiles else hidden_NH.dtype
        ),
        arithmetic=arithmetic,
        product_dtype=_product_dtype(hidden_NH.device, hidden_NH.dtype),
    )
    logprobs_N, entropies_N = _ChunkedHead.apply(hidden_NH, weight_VH, masters, targets_N, temperatures_N, head)
    return TokenScores(logprobs_N, entropies_N)


def choose_product_dtype(
    dtype: torch.dtype, *, device_type: str, capability: tuple[int, int] | None, has_wide_products: bool
) -> torch.dtype:
    """Return the dtype of what a matrix product of `dtype` gives: float32 where that costs no pass of its own, else `dtype`.

    Logits that are rounded to bfloat16 move log-probabilities by about 0.02.

    Args:
        capability: compute capability of the CUDA device.
        has_wide_products: torch's product can give another dtype than it multiplies.
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
    """How hidden states become scores; see `score_tokens`."""

    chunk_size: int
    uses_tiles: bool
    """A chunk is worked on a few tokens at a time. A GPU, and what is compiled, gain nothing by that."""
    form: LogitForm
    arithmetic: LogitArithmetic
    product_dtype: torch.dtype


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        master_VH: torch.Tensor,
        masters: MasterWeights,
        targets_N: torch.Tensor,
        temperatures_N: torch.Tensor,
        head: _Head,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weight_VH = masters.of(master_VH, hidden_NH.dtype)
        ctx.master, ctx.masters = master_VH, masters
        scores: list[tuple[torch.Tensor, ...]] = []
        for hidden_CH, *of_tokens_C in _chunks(hidden_NH, targets_N, temperatures_N, size=head.chunk_size):
            outputs_CV = _multiply(hidden_CH, weight_VH.T, dtype=head.product_dtype)
            for tile in _tiles(head, outputs_CV, *of_tokens_C):
                scores.append(head.arithmetic.score(*tile, form=head.form))
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
        of_tokens_N = [hidden_NH, targets_N, temperatures_N, log_totals_N, entropies_N, grad_logprobs_N]
        if grads[1] is not None:
            of_tokens_N.append(grads[1])
        for hidden_CH, *of_tokens_C in _chunks(*of_tokens_N, size=head.chunk_size):
            outputs_CV = _multiply(hidden_CH, weight_VH.T, dtype=head.product_dtype)
            grad_outputs_CV = _differentiate(head, outputs_CV, of_tokens_C, dtype=hidden_CH.dtype)
            grad_hidden.append(grad_outputs_CV @ weight_VH)
            if not ctx.needs_input_grad[1]:
                continue
            part_VH = _multiply(grad_outputs_CV.T, hidden_CH, dtype=head.product_dtype)
            if ctx.masters.sums_gradients:
                ctx.masters.add_gradient(ctx.master, part_VH)
                continue
            part_VH = part_VH.to(log_totals_N.dtype)
            grad_weight_VH = part_VH if grad_weight_VH is None else grad_weight_VH.add_(part_VH)
        grad_master_VH = None if grad_weight_VH is None else grad_weight_VH.to(ctx.master.dtype)
        return torch.cat(grad_hidden), grad_master_VH, None, None, None, None


def _multiply(left: torch.Tensor, right: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    return left @ right if dtype == left.dtype else torch.mm(left, right, out_dtype=dtype)


def _differentiate(
    head: _Head, outputs_CV: torch.Tensor, of_tokens_C: list[torch.Tensor], *, dtype: torch.dtype
) -> torch.Tensor:
    """Return the gradient with respect to `outputs_CV` in `dtype`. Eagerly it may be `outputs_CV` itself, changed."""
    if not head.uses_tiles:
        return head.arithmetic.differentiate(outputs_CV, *of_tokens_C, form=head.form)
    grad_CV = outputs_CV if outputs_CV.dtype == dtype else torch.empty_like(outputs_CV, dtype=dtype)
    for grad_RV, *tile in _tiles(head, grad_CV, outputs_CV, *of_tokens_C):
        grad_RV.copy_(head.arithmetic.differentiate(*tile, form=head.form))
    return grad_CV


def _chunks(*tensors: torch.Tensor, size: int) -> Any:
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)


def _tiles(head: _Head, outputs_CV: torch.Tensor, *of_tokens_C: torch.Tensor) -> Any:
    """Split a chunk into the tokens that are worked on at one time."""
    num_tokens, vocab_size = outputs_CV.shape
    num_cached = max(1, _CACHED_LOGITS // vocab_size)
    return _chunks(outputs_CV, *of_tokens_C, size=num_cached if head.uses_tiles else num_tokens)
