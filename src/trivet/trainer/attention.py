"""Attention over packed rows in which samples do not see each other, without a mask of T x T.

Legend: T tokens of a row, S samples in it, H query heads, K key-value heads, D head dimension.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig

from trivet.errors import ConfigError

logger = logging.getLogger(__name__)

_PREFIX = "trivet_packed_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Where the samples of a row lie."""

    lengths: tuple[int, ...]
    offsets: torch.Tensor
    """int32 [S + 1] on the device: 0 and the cumulated lengths."""

    @classmethod
    def of(cls, lengths: Sequence[int], *, device: torch.device) -> "Segments":
        offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return cls(lengths=tuple(lengths), offsets=offsets.to(device))


def register_attention(attn: str, *, device: torch.device, has_softcap: bool = False) -> str:
    """Make the configured attention known to transformers; returns its name there.

    Transformers builds no mask for a name that it has no mask function for, so none is registered.

    Args:
        has_softcap: the model caps the scores before the softmax, which no kernel of torch does.

    Raises:
        ConfigError: `flash_varlen` without a CUDA device, or for a model that caps its scores.
    """
    if attn == "flash_varlen" and has_softcap:
        raise ConfigError('model.attn = "flash_varlen" cannot cap scores as this model does; set model.attn = "sdpa"')
    if attn == "flash_varlen" and device.type != "cuda":
        raise ConfigError(f'model.attn = "flash_varlen" needs a CUDA device, this is {device.type}; set model.attn = "sdpa"')
    chosen = ("flash_varlen" if device.type == "cuda" and not has_softcap else "sdpa") if attn == "auto" else attn
    logger.info("attention chosen attn=%s device=%s", chosen, device.type)
    # A name with "sdpa" or "flash" in it would be checked for what transformers' own functions of that name can do.
    name, function = {"sdpa": ("by_sample", sdpa_packed), "flash_varlen": ("varlen", flash_varlen_packed)}[chosen]
    AttentionInterface.register(_PREFIX + name, function)
    return _PREFIX + name


def require_full_attention(config: PreTrainedConfig, *, seq_len: int) -> None:
    """
    Raises:
        ConfigError: the model limits attention to a window that a row could exceed.
    """
    window = getattr(config, "sliding_window", None)
    uses_window = getattr(config, "use_sliding_window", True) and "sliding_attention" in (
        getattr(config, "layer_types", None) or ["sliding_attention"]
    )
    if window is not None and uses_window and window < seq_len:
        raise ConfigError(
            f"the model attends over a window of {window} tokens only, model.seq_len is {seq_len}, and packed rows have no "
            f"window attention; set model.seq_len <= {window}"
        )


def sdpa_packed(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    segments: Segments,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention sample by sample.

    Args:
        query: [1, H, T, D]; key and value [1, K, T, D].
        softcap: scores become softcap * tanh(score / softcap).

    Returns:
        [1, T, H, D], and no attention weights.
    """
    dtype = query.dtype
    if query.device.type == "cpu":
        # Without matrix units for bf16 the CPU kernel's backward takes 5 times as long in bf16 as in float32.
        query, key, value = query.float(), key.float(), value.float()
    enable_gqa = query.shape[1] != key.shape[1]
    lengths = list(segments.lengths)
    parts = zip(query.split(lengths, dim=2), key.split(lengths, dim=2), value.split(lengths, dim=2), strict=True)
    if softcap is None:
        outputs = [
            scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=enable_gqa) for q, k, v in parts
        ]
    else:
        outputs = [_capped_attention(q, k, v, scaling=scaling, softcap=softcap) for q, k, v in parts]
    return torch.cat(outputs, dim=2).transpose(1, 2).to(dtype), None


def _capped_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scaling: float | None, softcap: float
) -> torch.Tensor:
    """Causal attention of one sample with all its scores in memory, because no kernel of torch caps them."""
    num_groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(num_groups, dim=1), value.repeat_interleave(num_groups, dim=1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = torch.tanh(scores / softcap) * softcap
    is_later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    weights = scores.masked_fill(is_later, float("-inf")).softmax(
        dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)
    )
    return weights.to(value.dtype) @ value


def flash_varlen_packed(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    segments: Segments,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The same in one kernel; shapes as in `sdpa_packed`. It takes float16 and bfloat16 only."""
    from torch.nn.attention.varlen import varlen_attn

    longest = max(segments.lengths)
    output = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        segments.offsets,
        segments.offsets,
        longest,
        longest,
        scale=scaling,
        window_size=(-1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output, torch.Tensor)
    return output[None], None
