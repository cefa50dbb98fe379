"""Attention over packed rows in which samples do not see each other, without a mask of T x T.

Called by `trainer.model.policy_model`, which registers one of the functions here with transformers.

Legend: T tokens of a row, S samples in it, H query heads, K key-value heads, D head dimension.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig

from trivet.errors import ConfigError
from trivet.trainer.attention.grouped import Groups, grouped_attention

logger = logging.getLogger(__name__)

_PREFIX = "trivet_packed_"

_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
"""The Python module of each attention that torch does not have."""
_FIRST_WITH_FLASH = (8, 0)
"""Compute capability of the first GPUs that flash attention runs on."""
_HOPPER = (9, 0)
"""Compute capability of the GPUs that flash attention 3 is for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """The places of a row's samples."""

    lengths: tuple[int, ...]
    offsets: torch.Tensor
    """int32 [S + 1] on the device: 0 and the cumulated lengths."""
    groups: Groups | None
    """The samples that are computed at once; set on a CPU only."""

    @classmethod
    def of(cls, lengths: Sequence[int], *, device: torch.device) -> "Segments":
        """Describe a row of samples of these lengths, in tokens, for `device`."""
        offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        groups = Groups.of(lengths) if device.type == "cpu" else None
        return cls(lengths=tuple(lengths), offsets=offsets.to(device), groups=groups)


def register_attention(attn: str, *, device: torch.device, dtype: torch.dtype, has_softcap: bool = False) -> str:
    """Register the configured attention with transformers and return its name there.

    Transformers builds no mask for a name without a mask function, so none is registered.

    Args:
        dtype: the dtype in which the model computes.
        has_softcap: the model caps the scores before the softmax, which no kernel of torch does.

    Raises:
        ConfigError: the device, the installed packages or the model do not allow it.
    """
    chosen = choose_attention(
        attn,
        device_type=device.type,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        is_float32=dtype == torch.float32,
        has_softcap=has_softcap,
        is_installed=lambda package: find_spec(package) is not None,
    )
    logger.info("attention chosen attn=%s device=%s", chosen, device.type)
    # Transformers would check a name with "sdpa" or "flash" in it against its own functions of that name.
    name, function = {
        "sdpa": ("by_sample", sdpa_packed),
        "grouped": ("by_group", grouped_packed),
        "flash_varlen": ("varlen", flash_varlen_packed),
        "flash_attention_2": ("fa2", partial(package_packed, "flash_attention_2")),
        "flash_attention_3": ("fa3", partial(package_packed, "flash_attention_3")),
    }[chosen]
    AttentionInterface.register(_PREFIX + name, function)
    return _PREFIX + name


def choose_attention(
    attn: str,
    *,
    device_type: str,
    capability: tuple[int, int] | None,
    is_float32: bool = False,
    has_softcap: bool,
    is_installed: Callable[[str], bool],
) -> str:
    """Resolve `model.attn` on this device: "auto" becomes the fastest attention, any other value is checked.

    Args:
        capability: compute capability of the CUDA device.
        is_float32: the model computes in float32, which no flash attention takes.

    Raises:
        ConfigError: as for `register_attention`.
    """
    if attn == "auto":
        if has_softcap or device_type not in ("cpu", "cuda"):
            return "sdpa"
        return "grouped" if device_type == "cpu" else _fastest_on_cuda(capability, is_float32, is_installed)
    if attn == "sdpa":
        return attn
    if has_softcap:
        raise ConfigError(f'model.attn = "{attn}" cannot cap scores as this model does; set model.attn = "sdpa"')
    if attn == "grouped":
        if device_type != "cpu":
            raise ConfigError(f'model.attn = "grouped" is for the CPU, this is {device_type}; set model.attn = "auto"')
        return attn
    if device_type != "cuda":
        raise ConfigError(f'model.attn = "{attn}" needs a CUDA device, this is {device_type}; set model.attn = "sdpa"')
    if attn in _PACKAGES and not is_installed(_PACKAGES[attn]):
        raise ConfigError(
            f'model.attn = "{attn}" needs the Python module {_PACKAGES[attn]}, which is not installed; install it, or set '
            'model.attn = "flash_varlen", which torch brings'
        )
    return attn


def _fastest_on_cuda(capability: tuple[int, int] | None, is_float32: bool, is_installed: Callable[[str], bool]) -> str:
    if is_float32 or (capability is not None and capability < _FIRST_WITH_FLASH):
        return "sdpa"
    # Flash attention 2 is no faster than torch's own, which is made from it.
    return "flash_attention_3" if capability == _HOPPER and is_installed(_PACKAGES["flash_attention_3"]) else "flash_varlen"


def require_full_attention(config: PreTrainedConfig, *, seq_len: int) -> None:
    """Refuse a model whose attention window is shorter than a row.

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
    """Compute causal attention sample by sample.

    Args:
        query: [1, H, T, D]; key and value [1, K, T, D].
        softcap: scores become softcap * tanh(score / softcap).

    Returns:
        [1, T, H, D], and no attention weights.
    """
    dtype = query.dtype
    if query.device.type == "cpu" and dtype == torch.bfloat16:
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
    """Compute causal attention of one sample with all scores in memory, because no kernel of torch caps them."""
    num_groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(num_groups, dim=1), value.repeat_interleave(num_groups, dim=1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = torch.tanh(scores / softcap) * softcap
    is_later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    weights = scores.masked_fill(is_later, float("-inf")).softmax(
        dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)
    )
    return weights.to(value.dtype) @ value


def grouped_packed(
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
    """Compute what `sdpa_packed` computes, by matrix products over samples of similar length; the shapes are the same."""
    assert segments.groups is not None, "attention by groups is for the CPU"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query_THD, key_TKD, value_TKD = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return grouped_attention(query_THD, key_TKD, value_TKD, segments.groups, scale=scale)[None], None


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
    """Compute what `sdpa_packed` computes in one kernel, for float16 and bfloat16; the shapes are the same."""
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


def package_packed(
    attn: str,
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
    """Compute what `sdpa_packed` computes with the package that `attn` names: flash-attn, or its version for Hopper GPUs.

    Shapes are as in `sdpa_packed`, dtypes as in `flash_varlen_packed`.
    """
    longest = max(segments.lengths)
    output = import_module(_PACKAGES[attn]).flash_attn_varlen_func(
        *(tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value)),
        cu_seqlens_q=segments.offsets,
        cu_seqlens_k=segments.offsets,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        softmax_scale=scaling,
        causal=True,
    )
    # Versions of the package for Hopper differ: some return the log-sums of the softmax as well.
    return (output[0] if isinstance(output, tuple) else output)[None], None
