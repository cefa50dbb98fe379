"""Replaces the parts of a model that are slow on a CPU, with backward passes that do less.

Called by `trainer.model.policy_model` before sharding. A part is replaced only if a probe shows that it computes what the
replacement does; every other model, and every other part, runs as transformers wrote it.

docs/benchmarks/training.json compares all of them together with a plain loop.

Legend: T tokens, I features in, O features out.
"""

import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.func import functional_call
from transformers import PreTrainedModel

from trivet.trainer.attention.choice import HeadDims
from trivet.trainer.optim.master_weights import MasterWeights

logger = logging.getLogger(__name__)

_PROBE_TOKENS = 3
"""Tokens of the input on which a part is compared with its replacement."""


def speed_up_on_cpu(causal_lm: PreTrainedModel, *, dtype: torch.dtype) -> MasterWeights | None:
    """Replace every part that can be replaced; names of parameters stay.

    Args:
        dtype: the dtype in which the model computes, whatever its parameters have.

    Returns:
        The master weights, from which the model casts by itself; None if a part that was not replaced uses a parameter.
    """
    masters = MasterWeights()
    head = causal_lm.get_output_embeddings()
    num_linears = num_norms = 0
    others: list[str] = []
    for name, module in causal_lm.named_modules():
        if module is head:
            continue
        if type(module) is torch.nn.Linear:
            setattr(module, "forward", partial(apply_linear, module, masters))  # noqa: B010  # on this module alone
            num_linears += 1
        elif _is_rms_norm(module):
            setattr(module, "forward", partial(apply_norm, module, _epsilon(module)))  # noqa: B010
            num_norms += 1
        elif type(module) is torch.nn.Embedding and module is causal_lm.get_input_embeddings():
            setattr(module, "forward", partial(embed, module, masters, dtype))  # noqa: B010
        elif any(True for _ in module.parameters(recurse=False)):
            others.append(name)
    has_rotary = _replace_rotary(causal_lm)
    logger.info("CPU kernels linears=%s norms=%s rotary=%s others=%s", num_linears, num_norms, has_rotary, len(others))
    return None if others else masters


def embed(module: torch.nn.Embedding, masters: MasterWeights, dtype: torch.dtype, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the embeddings of tokens in `dtype`, or in float64 for an embedding in float64."""
    weight = module.weight
    dtype = weight.dtype if weight.dtype == torch.float64 else dtype
    return _Embedding.apply(token_ids, weight, masters, module.padding_idx, dtype)  # type: ignore[no-any-return]


class _Embedding(torch.autograd.Function):
    """An embedding whose gradient touches the rows of the tokens present; autograd's is a matrix of the whole vocabulary."""

    @staticmethod
    def forward(
        ctx: Any,
        token_ids: torch.Tensor,
        weight_VH: torch.Tensor,
        masters: MasterWeights,
        padding_idx: int | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.save_for_backward(token_ids)
        ctx.master, ctx.masters, ctx.padding_idx = weight_VH, masters, padding_idx
        return torch.nn.functional.embedding(token_ids, weight_VH).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (token_ids,) = ctx.saved_tensors
        ids_N, grad_NH = token_ids.flatten(), grads[0].flatten(0, -2)
        if ctx.padding_idx is not None:  # the embedding of padding is not trained
            is_trained_N = ids_N != ctx.padding_idx
            ids_N, grad_NH = ids_N[is_trained_N], grad_NH[is_trained_N]
        return None, ctx.masters.add_to_rows(ctx.master, ids_N, grad_NH), None, None, None


def apply_linear(module: torch.nn.Linear, masters: MasterWeights, inputs: torch.Tensor) -> torch.Tensor:
    """Apply a linear layer with the narrow copy of its weight."""
    outputs = _Linear.apply(inputs, module.weight, masters)
    return outputs if module.bias is None else outputs + module.bias.to(outputs.dtype)


class _Linear(torch.autograd.Function):
    """A linear layer with a faster gradient of its weight.

    That gradient is a product over tokens, and oneDNN takes twice as long if its first factor is a transposed view. So the narrower
    of the two factors is copied, and a product that comes out transposed is transposed back.
    """

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, master_OI: torch.Tensor, masters: MasterWeights) -> torch.Tensor:
        weight_OI = masters.of(master_OI, inputs.dtype)
        ctx.save_for_backward(inputs, weight_OI)
        ctx.dtype = master_OI.dtype
        return torch.nn.functional.linear(inputs, weight_OI)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        inputs, weight_OI = ctx.saved_tensors
        grad_inputs = grads[0] @ weight_OI if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return grad_inputs, None, None
        return grad_inputs, weight_gradient(inputs.flatten(0, -2), grads[0].flatten(0, -2), dtype=ctx.dtype), None


def weight_gradient(inputs_TI: torch.Tensor, grad_TO: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """Return grad.T @ inputs, [O, I], in `dtype` and contiguous, because adding up a transposed one is slow."""
    if grad_TO.dtype != torch.bfloat16:
        return (grad_TO.t() @ inputs_TI).to(dtype)
    if grad_TO.shape[1] <= inputs_TI.shape[1]:
        return (grad_TO.t().contiguous() @ inputs_TI).to(dtype)
    product_IO = inputs_TI.t().contiguous() @ grad_TO
    return torch.empty(product_IO.shape[::-1], dtype=dtype, device=product_IO.device).copy_(product_IO.t())


def apply_norm(module: torch.nn.Module, epsilon: float, inputs: torch.Tensor) -> torch.Tensor:
    """Apply an RMS norm; in float64 as transformers does, because `rms_norm` computes in float32."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    if inputs.dtype == torch.float64:
        return type(module).forward(module, inputs)
    return rms_norm(inputs, weight, epsilon=epsilon)


def rms_norm(inputs: torch.Tensor, weight: torch.Tensor, *, epsilon: float) -> torch.Tensor:
    """Normalize over the last dimension in float32; the weight multiplies the result rounded to the dtype of the input."""
    return _RMSNorm.apply(inputs, weight, epsilon)  # type: ignore[no-any-return]  # apply is untyped


class _RMSNorm(torch.autograd.Function):
    """RMS norm that keeps its input and one number a token; autograd would keep three float32 copies of the input.

    With r = 1 / rms(x) and m = grad * x: dw = sum over tokens of r * m, dx = r * grad * w - x * r^3 * mean(m * w).
    """

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        wide = inputs.to(torch.float32, copy=True)
        scales = wide.pow(2).mean(-1, keepdim=True).add_(epsilon).rsqrt_()
        ctx.save_for_backward(inputs, weight, scales)
        return wide.mul_(scales).to(inputs.dtype).mul_(weight.to(inputs.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        inputs, weight, scales = ctx.saved_tensors
        # A master weight takes part as it did in the forward pass, rounded.
        wide, wide_weight = inputs.float().flatten(0, -2), weight.to(inputs.dtype).float()
        grad = grads[0].to(torch.float32, copy=True).flatten(0, -2)
        scales = scales.flatten()
        products = grad * wide
        grad_weight = scales @ products
        means = (products @ wide_weight).div_(inputs.shape[-1])
        grad.mul_(wide_weight).mul_(scales[:, None]).addcmul_(wide, (means * scales**3)[:, None], value=-1)
        return grad.to(inputs.dtype).view(inputs.shape), grad_weight.to(weight.dtype), None


def _epsilon(module: torch.nn.Module) -> float:
    found = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return float(found) if isinstance(found, int | float) else -1.0


def _is_rms_norm(module: torch.nn.Module) -> bool:
    """Tell whether `module` gives, bit by bit, what `rms_norm` gives for a made-up input and weight."""
    if not type(module).__name__.endswith("RMSNorm") or [name for name, _ in module.named_parameters()] != ["weight"]:
        return False
    weight = torch.linspace(-1.5, 1.5, module.weight.numel())  # type: ignore[reportCallIssue, reportArgumentType]  # one tensor
    inputs = torch.linspace(-3.0, 2.0, _PROBE_TOKENS * len(weight)).view(_PROBE_TOKENS, -1)
    inputs[0] *= 1e-3  # so small that epsilon matters
    with torch.no_grad():
        return all(
            torch.equal(
                functional_call(module, {"weight": weight.to(dtype)}, inputs.to(dtype)),
                rms_norm(inputs.to(dtype), weight.to(dtype), epsilon=_epsilon(module)),
            )
            for dtype in (torch.float32, torch.bfloat16)
        )


Rotary = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class _Rotary(torch.autograd.Function):
    """Rotation of pairs made of the two halves of a head; the gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate_halves(values, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate_halves(grads[0], cos, -sin.roll(sin.shape[-1] // 2, -1)), None, None


def _rotate_halves(values: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first features of each head, as many as `cos` has; the others stay. `cos` may be wider than `values`."""
    num_rotated = cos.shape[-1]
    half = num_rotated // 2
    rotated = values[..., :num_rotated] * cos
    rotated[..., :half].addcmul_(values[..., half:num_rotated], sin[..., :half], value=-1)
    rotated[..., half:].addcmul_(values[..., :half], sin[..., half:])
    rotated = rotated.to(values.dtype)
    return rotated if num_rotated == values.shape[-1] else torch.cat([rotated, values[..., num_rotated:]], dim=-1)


def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> Any:
    """Apply rotary positions to queries and keys.

    Arguments have the names of the transformers function that this one replaces.
    """
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _Rotary.apply(q, cos, sin), _Rotary.apply(k, cos, sin)


_replaced: dict[str, Rotary] = {}
"""The functions of transformers in whose place `rotate` is, by their modules."""


def _replace_rotary(causal_lm: PreTrainedModel) -> bool:
    """Replace the function in the module that defines the model: its blocks look it up there by name."""
    modeling: Any = sys.modules[type(causal_lm).__module__]
    current: Rotary | None = getattr(modeling, "apply_rotary_pos_emb", None)
    if current is None:
        return False
    original = _replaced[modeling.__name__] if current is rotate else current
    modeling.apply_rotary_pos_emb = original
    if not _rotates_alike(original, causal_lm):
        return False
    _replaced[modeling.__name__], modeling.apply_rotary_pos_emb = original, rotate
    return True


def _rotates_alike(original: Rotary, causal_lm: PreTrainedModel) -> bool:
    """Tell whether `original` does what `rotate` does, for heads of which as many features are rotated as in this model.

    Some models call the function for whole heads, others only for what is rotated of them.
    """
    rotated = {2 * len(buffer) for name, buffer in causal_lm.named_buffers() if name.endswith("inv_freq")}
    dim = HeadDims.of(causal_lm.config).query
    outcomes = [_compare_rotation(original, *sizes) for size in rotated for sizes in {(size, size), (max(dim, size), size)}]
    return True in outcomes and False not in outcomes


def _compare_rotation(original: Rotary, num_features: int, num_rotated: int) -> bool | None:
    """Tell whether `original` does what `rotate` does; None: it does not take so many features, or has other arguments."""
    angles = torch.linspace(0.0, 2.0, _PROBE_TOKENS * num_rotated, dtype=torch.float64).view(1, _PROBE_TOKENS, -1)
    values = torch.linspace(-1.0, 1.0, 2 * _PROBE_TOKENS * num_features, dtype=torch.float64)
    query = values.view(1, 2, _PROBE_TOKENS, num_features)
    try:
        found = original(query, query[:, :1], angles.cos(), angles.sin())
    except (TypeError, ValueError, RuntimeError):
        return None
    expected = rotate(query, query[:, :1], angles.cos(), angles.sin())
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(found, expected, strict=True)
    )
