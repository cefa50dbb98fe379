"""Attention over packed rows in which samples do not see each other, without a mask of T x T.

Called by `trainer.model.policy_model`, which registers one of the functions here with transformers.

Segments are what `trainer.prefixes` makes of the samples: a segment sees its prefix and itself. Where nothing is shared, a segment
is a sample, and its prefix is empty.

Legend: T tokens of a row, S segments in it, E tokens of all segments with their prefixes, H query heads, K key-value heads,
D head dimension.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from trivet.errors import ConfigError
from trivet.trainer.attention.choice import (
    IMPLEMENTATIONS,
    PACKAGES,
    PROBE_LENGTHS,
    PROBE_PATHS,
    HeadDims,
    choose_attention,
    replace_kernels,
)
from trivet.trainer.device_copies import to_device
from trivet.trainer.prefixes import PrefixTree

logger = logging.getLogger(__name__)

_PREFIX = "trivet_packed_"
TRACEABLE = frozenset({f"{_PREFIX}varlen"})
"""Attentions that torch.compile can trace for rows of any segments: one operator of torch, whose shapes it knows."""
_HAS_ENABLE_GQA = "enable_gqa" in signature(varlen_attn).parameters
"""True where varlen_attn must be told that keys have fewer heads than queries. Torch 2.11 has no such argument."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """The places of a row's segments, and of the tokens whose keys and values they read: their own behind those of their prefixes.

    In a compiled graph a tuple of lengths would be compiled anew for each row, a number is not.
    """

    lengths: tuple[int, ...]
    longest: int
    """Tokens of the longest segment, without its prefix."""
    offsets: torch.Tensor
    """int32 [S + 1] on the device: 0 and the cumulated lengths."""
    key_tokens: torch.Tensor | None
    """int64 [E]: tokens of the row, each segment behind its prefix. None when no segment continues another."""
    key_lengths: tuple[int, ...]
    """Length of each segment with its prefix."""
    longest_sample: int
    """The longest of them."""
    key_offsets: torch.Tensor
    """int32 [S + 1]: 0 and the cumulated lengths, prefixes included."""

    def shortens(self, window: int | None) -> bool:
        """Tell whether a window of so many tokens hides any token of a sample from a later one; None: there is no window."""
        return window is not None and window < self.longest_sample

    @classmethod
    def of(cls, lengths: Sequence[int], *, device: torch.device) -> "Segments":
        """Describe a row of samples of these lengths, in tokens, that share nothing, for `device`."""
        return cls.behind(lengths, [()] * len(lengths), device=device)

    @classmethod
    def of_tree(cls, tree: PrefixTree, *, device: torch.device) -> "Segments":
        """Describe a row that holds the segments of `tree`, one behind the other, for `device`."""
        return cls.behind(tree.lengths, [tree.path(segment) for segment in range(len(tree.lengths))], device=device)

    @classmethod
    def behind(cls, lengths: Sequence[int], paths: Sequence[Sequence[int]], *, device: torch.device) -> "Segments":
        """Describe a row of segments of these lengths, in tokens. `paths`: the segments that each continues, in order."""

        def offsets(lengths: Sequence[int]) -> torch.Tensor:
            return to_device(torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32), device)

        own_offsets = offsets(lengths)
        tokens, key_lengths, key_offsets = None, tuple(lengths), own_offsets
        if any(paths):
            segment_tokens = torch.arange(sum(lengths)).split(list(lengths))
            read = [torch.cat([segment_tokens[place] for place in (*path, own)]) for own, path in enumerate(paths)]
            tokens, key_lengths = to_device(torch.cat(read), device), tuple(map(len, read))
            key_offsets = offsets(key_lengths)
        return cls(
            lengths=tuple(lengths),
            longest=max(lengths),
            offsets=own_offsets,
            key_tokens=tokens,
            key_lengths=key_lengths,
            longest_sample=max(key_lengths),
            key_offsets=key_offsets,
        )


def packs_rows(attention: str) -> bool:
    """Tell whether the attention of this name keeps the samples of a row apart: transformers' own do not."""
    return attention.startswith(_PREFIX)


def register_attention(
    attn: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    has_special_scores: bool = False,
    heads: HeadDims,
) -> str:
    """Register the configured attention with transformers and return its name there. Arguments are those of `choose_attention`.

    Transformers builds no mask for a name without a mask function, so none is registered.
    """
    refused: set[str] = set()
    while True:
        resolved = choose_attention(
            attn,
            device_type=device.type,
            capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
            is_float32=dtype == torch.float32,
            has_special_scores=has_special_scores,
            heads=heads,
            is_installed=lambda package: package not in refused and _is_installed(package),
        )
        if resolved not in IMPLEMENTATIONS:
            break
        attend = partial(_attend_probe, device=device)
        reason = replace_kernels(resolved, attend, head_dim=heads.query, device=device, dtype=dtype)
        if reason is None:
            break
        if attn != "auto":
            raise ConfigError(f'model.attn = "{attn}" cannot be used: {reason}; set model.attn = "flash_varlen"')
        logger.warning('model.attn = "auto" does not use %s, which is installed: %s', resolved, reason)
        refused.add(PACKAGES[resolved])
    logger.info("attention chosen attn=%s device=%s", resolved, device.type)
    # Transformers would check a name with "sdpa" or "flash" in it against its own functions of that name.
    name, function = {
        "sdpa": ("by_sample", sdpa_packed),
        "flash_varlen": ("varlen", flash_varlen_packed),
        "flash_attention_2": ("fa2", partial(package_packed, "flash_attention_2")),
        "flash_attention_3": ("varlen", flash_varlen_packed),
        "flash_attention_4": ("varlen", flash_varlen_packed),
    }[resolved]

    def attend_or_drop(*tensors: Any, dropout: float = 0.0, **options: Any) -> tuple[torch.Tensor, None]:
        """Compute attention; with dropout by `sdpa_packed`, because no other attention here draws any."""
        if dropout:
            return _drop_packed(*tensors, dropout=dropout, **options)
        return function(*tensors, **options)

    AttentionInterface.register(_PREFIX + name, attend_or_drop)
    return _PREFIX + name


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:  # a package around the module is missing, or does not load
        return False


def _attend_probe(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, device: torch.device) -> torch.Tensor:
    segments = Segments.behind(PROBE_LENGTHS, PROBE_PATHS, device=device)
    return flash_varlen_packed(torch.nn.Identity(), query, key, value, None, segments=segments)[0]


def sdpa_packed(  # those that transformers gives to an attention
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    segments: Segments,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention segment by segment; return [1, T, H, D] and no attention weights.

    Args:
        query: [1, H, T, D]; key and value [1, K, T, D].
        dropout: share of the attention weights that are zeroed.
        options: what transformers' models give besides. `softcap`: scores become softcap * tanh(score / softcap).
            `sliding_window`: a token sees so many tokens, itself the last. `s_aux`, [H]: scores of sinks, keys without a value.
    """
    dtype = query.dtype
    if query.device.type == "cpu" and dtype == torch.bfloat16:
        # Without matrix units for bf16 the CPU kernel's backward takes 5 times as long in bf16 as in float32.
        query, key, value = query.float(), key.float(), value.float()
    if query.device.type != "cpu":
        # Of torch's kernels for CUDA that hold no scores, the one for float32, masks and GPUs before Ampere knows no groups.
        key, value = _repeat_heads(query, key, value)
    if segments.key_tokens is not None:
        key, value = (tensor.index_select(2, segments.key_tokens) for tensor in (key, value))
    parts = zip(
        query.split(list(segments.lengths), dim=2),
        key.split(list(segments.key_lengths), dim=2),
        value.split(list(segments.key_lengths), dim=2),
        strict=True,
    )
    softcap, sinks_H, window = options.get("softcap"), options.get("s_aux"), options.get("sliding_window")
    given: dict[str, Any] = {"scaling": scaling, "dropout": dropout, "window": window if segments.shortens(window) else None}
    if softcap is not None or sinks_H is not None:
        outputs = [_attend_in_memory(q, k, v, softcap=softcap, sinks_H=sinks_H, **given) for q, k, v in parts]
    else:
        outputs = [_causal_attention(q, k, v, **given) for q, k, v in parts]
    return torch.cat(outputs, dim=2).transpose(1, 2).to(dtype), None


_drop_packed: Any = torch.compiler.disable(sdpa_packed)
"""`sdpa_packed` for graphs of any row: traced, its loop over segments would be compiled anew for each row."""


def _repeat_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values with as many heads as `query`."""
    num_groups = query.shape[1] // key.shape[1]
    if num_groups == 1:
        return key, value
    return key.repeat_interleave(num_groups, dim=1), value.repeat_interleave(num_groups, dim=1)


def _causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scaling: float | None, dropout: float, window: int | None
) -> torch.Tensor:
    """Compute attention of one segment; its queries are the last of its keys' tokens."""
    options: dict[str, Any] = {"scale": scaling, "dropout_p": dropout, "enable_gqa": query.shape[1] != key.shape[1]}
    if query.shape[2] == key.shape[2] and window is None:
        return scaled_dot_product_attention(query, key, value, is_causal=True, **options)
    return scaled_dot_product_attention(query, key, value, attn_mask=~_is_hidden(query, key, window=window), **options)


def _is_hidden(query: torch.Tensor, key: torch.Tensor, *, window: int | None) -> torch.Tensor:
    """Return bool [queries, keys]: the key comes behind the query, or before its window."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
    is_later = ones.triu(1 + num_keys - num_queries)
    return is_later if window is None else is_later | ones.tril(num_keys - num_queries - window)


def _attend_in_memory(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scaling: float | None,
    dropout: float,
    window: int | None,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Compute attention of one segment with all scores in memory, because no kernel of torch caps them or has sinks."""
    is_hidden = _is_hidden(query, key, window=window)
    key, value = _repeat_heads(query, key, value)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(is_hidden, float("-inf"))
    if sinks_H is not None:
        sinks = sinks_H.to(scores.dtype).view(1, -1, 1, 1).expand(-1, -1, scores.shape[2], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    weights = torch.nn.functional.dropout(weights[..., : key.shape[2]], dropout)
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
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute what `sdpa_packed` computes in one kernel, for float16 and bfloat16; the shapes are the same."""
    query, key, value, lengths = _unpack(query, key, value, segments)
    groups: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if _HAS_ENABLE_GQA else {}
    num_before = -1 if sliding_window is None else sliding_window - 1  # tokens that a token sees before itself; -1: all
    output = varlen_attn(query, key, value, *lengths, scale=scaling, window_size=(num_before, 0), **groups)
    assert isinstance(output, torch.Tensor)
    return output[None], None


def _unpack(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor, int, int]]:
    """Return queries [T, H, D], keys and values [E, K, D], and the offsets and longest lengths of queries and keys.

    Flash attention aligns a causal mask with the last query and the last key, as a segment behind its prefix needs it.
    """
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if segments.key_tokens is not None:
        key, value = (tensor.index_select(0, segments.key_tokens) for tensor in (key, value))
    return query, key, value, (segments.offsets, segments.key_offsets, segments.longest, segments.longest_sample)


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
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute what `sdpa_packed` computes with the package that `attn` names.

    Shapes are as in `sdpa_packed`, dtypes as in `flash_varlen_packed`.
    """
    query, key, value, (offsets_q, offsets_k, longest_q, longest_k) = _unpack(query, key, value, segments)
    sliding_window = options.get("sliding_window")
    window: dict[str, Any] = {} if sliding_window is None else {"window_size": (sliding_window - 1, 0)}
    output = import_module(PACKAGES[attn]).flash_attn_varlen_func(
        *(tensor.contiguous() for tensor in (query, key, value)),
        cu_seqlens_q=offsets_q,
        cu_seqlens_k=offsets_k,
        max_seqlen_q=longest_q,
        max_seqlen_k=longest_k,
        softmax_scale=scaling,
        causal=True,
        deterministic=torch.are_deterministic_algorithms_enabled(),  # the packages know nothing of torch's own switch
        **window,
    )
    # Versions of the package for Hopper differ: some return the log-sums of the softmax as well.
    return (output[0] if isinstance(output, tuple) else output)[None], None
