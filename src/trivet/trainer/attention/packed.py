"""Computes attention over packed rows so that samples do not see each other, without a mask of T x T.

Called by `trainer.model.policy_model`, which registers one of the functions here with transformers.

`trainer.prefixes` splits samples into segments: tokens that several samples share are one segment, computed once. A segment sees
the segments before it on its path (its prefix) and itself. Where nothing is shared, a segment is a sample without a prefix.

Legend: T tokens of a row, S segments in it, E tokens of all segments with their prefixes, H query heads, K key-value heads,
D head dimension.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
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

_NAME_PREFIX = "trivet_packed_"
TRACEABLE_ATTENTIONS = frozenset({f"{_NAME_PREFIX}varlen"})
"""Registered names that torch.compile traces once for all rows: they call one operator of torch, whose shapes it knows."""
_HAS_ENABLE_GQA = "enable_gqa" in signature(varlen_attn).parameters
"""True where varlen_attn has an argument for keys with fewer heads than queries. Torch 2.11 has none."""


_BATCHED_LENGTHS = 32
"""Segments whose lengths lie between two multiples of this many tokens are padded to one length, and computed by one call of a
kernel. On a CPU eight calls for 64 tokens each take twice as long. Padding costs fewer than these tokens a segment."""

PackedAttention = Callable[..., tuple[torch.Tensor, None]]
"""Attention as transformers calls it, with the shapes of `sdpa_packed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Says where each segment lies in a row, and which key tokens it reads: those of its prefix, then its own.

    Compiled code uses the tensors and the two maxima only: torch.compile would compile anew for each new tuple of lengths.
    """

    lengths: tuple[int, ...]
    """Tokens of each segment, without its prefix."""
    max_length: int
    """The largest of them."""
    offsets: torch.Tensor
    """int32 [S + 1] on the device: 0 and the cumulated lengths."""
    key_tokens: torch.Tensor | None
    """int64 [E]: for each segment, the places in the row of its prefix's tokens and its own. None when no segment has a prefix."""
    key_lengths: tuple[int, ...]
    """Tokens of each segment with its prefix: the length of a sample that ends there."""
    max_key_length: int
    """The largest of them."""
    key_offsets: torch.Tensor
    """int32 [S + 1]: 0 and the cumulated lengths, prefixes included."""

    @property
    def batches(self) -> list[list[int]]:
        """The indices of the segments that one call of a kernel computes: their prefixes are equally long, and they almost."""
        batches: dict[tuple[int, int], list[int]] = {}
        for index, (length, key_length) in enumerate(zip(self.lengths, self.key_lengths, strict=True)):
            batches.setdefault((key_length - length, length // _BATCHED_LENGTHS), []).append(index)
        return list(batches.values())

    def effective_window(self, window: int | None) -> int | None:
        """Return the sliding window in tokens, or None where there is none or no sample is longer than it."""
        return window if window is not None and window < self.max_key_length else None

    def with_segment(self, length: int) -> "Segments":
        """Return these segments and one more of `length` tokens at the end of the row, without a prefix."""

        def extend(offsets: torch.Tensor) -> torch.Tensor:
            return torch.cat([offsets, offsets[-1:] + length])

        key_tokens = self.key_tokens
        if key_tokens is not None:
            num_tokens = sum(self.lengths)
            key_tokens = torch.cat([key_tokens, torch.arange(num_tokens, num_tokens + length, device=key_tokens.device)])
        return Segments(
            lengths=(*self.lengths, length),
            max_length=max(self.max_length, length),
            offsets=extend(self.offsets),
            key_tokens=key_tokens,
            key_lengths=(*self.key_lengths, length),
            max_key_length=max(self.max_key_length, length),
            key_offsets=extend(self.key_offsets),
        )

    @classmethod
    def from_samples(cls, lengths: Sequence[int], *, device: torch.device) -> "Segments":
        """Describe a row of samples of these lengths, in tokens, that share nothing, for `device`."""
        return cls.from_paths(lengths, [()] * len(lengths), device=device)

    @classmethod
    def from_tree(cls, tree: PrefixTree, *, device: torch.device) -> "Segments":
        """Describe a row that holds the segments of `tree`, one after the other, for `device`."""
        return cls.from_paths(tree.lengths, [tree.path(segment) for segment in range(len(tree.lengths))], device=device)

    @classmethod
    def from_paths(cls, lengths: Sequence[int], paths: Sequence[Sequence[int]], *, device: torch.device) -> "Segments":
        """Describe a row of segments of these lengths, in tokens. `paths`: the indices of each one's prefix segments."""

        def cumulate(lengths: Sequence[int]) -> torch.Tensor:
            return to_device(torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32), device)

        offsets = cumulate(lengths)
        tokens, key_lengths, key_offsets = None, tuple(lengths), offsets
        if any(paths):
            segment_tokens = torch.arange(sum(lengths)).split(list(lengths))
            tokens_read = [torch.cat([segment_tokens[index] for index in (*path, own)]) for own, path in enumerate(paths)]
            tokens, key_lengths = to_device(torch.cat(tokens_read), device), tuple(map(len, tokens_read))
            key_offsets = cumulate(key_lengths)
        return cls(
            lengths=tuple(lengths),
            max_length=max(lengths),
            offsets=offsets,
            key_tokens=tokens,
            key_lengths=key_lengths,
            max_key_length=max(key_lengths),
            key_offsets=key_offsets,
        )


def packs_rows(attention: str) -> bool:
    """Return whether the attention of this name keeps the samples of a row apart. Those of transformers do not."""
    return attention.startswith(_NAME_PREFIX)


def register_attention(
    attn: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    has_special_scores: bool = False,
    heads: HeadDims,
    divide_attention: Callable[[PackedAttention], PackedAttention] | None = None,
) -> str:
    """Register the configured attention with transformers and return its name there.

    Transformers builds no mask for a name without a mask function, so none is registered.

    Args:
        divide_attention: makes the attention of a whole row one of this rank's slice (`attention.context`). Other arguments are
            those of `choose_attention`.
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
        attend = partial(_attend_test_row, device=device)
        why_refused = replace_kernels(resolved, attend, head_dim=heads.query, device=device, dtype=dtype)
        if why_refused is None:
            break
        if attn != "auto":
            raise ConfigError(f'model.attn = "{attn}" cannot be used: {why_refused}; set model.attn = "flash_varlen"')
        logger.warning('model.attn = "auto" does not use %s, which is installed: %s', resolved, why_refused)
        refused.add(PACKAGES[resolved])
    logger.info("attention chosen attn=%s device=%s", resolved, device.type)
    # Transformers would check a name with "sdpa" or "flash" in it against its own functions of that name.
    # Packages of flash attention replace the kernels behind torch's `varlen_attn`.
    name, function = ("by_sample", sdpa_packed) if resolved == "sdpa" else ("varlen", flash_varlen_packed)

    def attend_packed(*tensors: Any, dropout: float = 0.0, **options: Any) -> tuple[torch.Tensor, None]:
        """Compute attention; with dropout by `sdpa_packed`, the only one here that supports it."""
        if dropout:
            return _sdpa_packed_uncompiled(*tensors, dropout=dropout, **options)
        return function(*tensors, **options)

    if divide_attention is not None:
        name = "sliced"
    AttentionInterface.register(_NAME_PREFIX + name, divide_attention(attend_packed) if divide_attention else attend_packed)
    return _NAME_PREFIX + name


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:  # a package around the module is missing, or does not load
        return False


def _attend_test_row(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, device: torch.device) -> torch.Tensor:
    segments = Segments.from_paths(PROBE_LENGTHS, PROBE_PATHS, device=device)
    return flash_varlen_packed(torch.nn.Identity(), query, key, value, None, segments=segments)[0]


def sdpa_packed(  # transformers fixes the signature
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
    """Compute causal attention of each segment, those of `Segments.batches` at once; return [1, T, H, D] and no attention weights.

    Args:
        query: [1, H, T, D]; key and value [1, K, T, D].
        dropout: share of the attention weights that are zeroed.
        options: further arguments that models of transformers pass. `softcap`: scores become softcap * tanh(score / softcap).
            `sliding_window`: a token sees this many tokens, itself included. `s_aux`, [H]: scores of sinks, keys without a value.
    """
    dtype = query.dtype
    if query.device.type == "cpu" and dtype == torch.bfloat16:
        # On a CPU without matrix units for bf16, the kernel's backward takes 5 times as long in bf16 as in float32.
        query, key, value = query.float(), key.float(), value.float()
    if query.device.type != "cpu":
        # On CUDA the kernel for float32, for masks and for GPUs before Ampere does not support fewer key heads than query heads.
        key, value = _repeat_heads(query, key, value)
    if segments.key_tokens is not None:
        key, value = (tensor.index_select(2, segments.key_tokens) for tensor in (key, value))
    parts = [
        query.split(list(segments.lengths), dim=2),
        key.split(list(segments.key_lengths), dim=2),
        value.split(list(segments.key_lengths), dim=2),
    ]
    softcap, sinks_H, window = options.get("softcap"), options.get("s_aux"), options.get("sliding_window")
    common: dict[str, Any] = {"scaling": scaling, "dropout": dropout, "window": segments.effective_window(window)}
    attend = _causal_attention
    if softcap is not None or sinks_H is not None:
        attend = partial(_attend_with_all_scores, softcap=softcap, sinks_H=sinks_H)
    outputs: dict[int, torch.Tensor] = {}
    for indices in segments.batches:
        length = max(segments.lengths[index] for index in indices)
        # Queries and keys are padded alike, at their end. So no real query sees the padding, which comes after it.
        padding = [(index, (0, 0, 0, length - segments.lengths[index])) for index in indices]
        batch = [
            torch.cat([pad(tensors[index], more) if more[-1] else tensors[index] for index, more in padding])
            for tensors in parts
        ]
        for index, output in zip(indices, attend(*batch, **common).split(1), strict=True):
            outputs[index] = output[:, :, : segments.lengths[index]]
    return torch.cat([outputs[index] for index in range(len(outputs))], dim=2).transpose(1, 2).to(dtype), None


_sdpa_packed_uncompiled: Any = torch.compiler.disable(sdpa_packed)
"""`sdpa_packed` outside of compiled graphs: its loop over segments would be compiled anew for each row."""


def _repeat_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values with as many heads as `query`."""
    queries_per_key = query.shape[1] // key.shape[1]
    if queries_per_key == 1:
        return key, value
    return key.repeat_interleave(queries_per_key, dim=1), value.repeat_interleave(queries_per_key, dim=1)


def _causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scaling: float | None, dropout: float, window: int | None
) -> torch.Tensor:
    """Compute attention of a batch of segments. Queries belong to the last tokens of the keys; earlier keys are the prefix."""
    options: dict[str, Any] = {"scale": scaling, "dropout_p": dropout, "enable_gqa": query.shape[1] != key.shape[1]}
    if query.shape[2] == key.shape[2] and window is None:
        return scaled_dot_product_attention(query, key, value, is_causal=True, **options)
    return scaled_dot_product_attention(query, key, value, attn_mask=~_is_hidden(query, key, window=window), **options)


def _is_hidden(query: torch.Tensor, key: torch.Tensor, *, window: int | None) -> torch.Tensor:
    """Return bool [queries, keys]: true where the key comes after the query, or before its window."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
    is_later = ones.triu(1 + num_keys - num_queries)
    return is_later if window is None else is_later | ones.tril(num_keys - num_queries - window)


def _attend_with_all_scores(
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
    """Compute attention of segments with all scores in memory, because no kernel of torch caps them or has sinks."""
    is_hidden = _is_hidden(query, key, window=window)
    key, value = _repeat_heads(query, key, value)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(is_hidden, float("-inf"))
    if sinks_H is not None:
        sinks = sinks_H.to(scores.dtype).view(1, -1, 1, 1).expand(len(scores), -1, scores.shape[2], 1)
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
    **_: Any,  # models with `softcap` or sinks get `sdpa_packed` (`choose_attention`)
) -> tuple[torch.Tensor, None]:
    """Compute the same as `sdpa_packed`, but in one kernel and for float16 and bfloat16 alone; the shapes are the same."""
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if segments.key_tokens is not None:
        key, value = (tensor.index_select(0, segments.key_tokens) for tensor in (key, value))
    # Flash attention aligns the causal mask at the last query and the last key. A segment after its prefix needs that.
    lengths = (segments.offsets, segments.key_offsets, segments.max_length, segments.max_key_length)
    head_options: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if _HAS_ENABLE_GQA else {}
    num_before = -1 if sliding_window is None else sliding_window - 1  # tokens that a token sees before itself; -1: all
    output = varlen_attn(query, key, value, *lengths, scale=scaling, window_size=(num_before, 0), **head_options)
    assert isinstance(output, torch.Tensor)
    return output[None], None
