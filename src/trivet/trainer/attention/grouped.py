"""Attention over packed rows by matrix products, for the CPU: samples of similar length are computed at once.

Called by `trainer.attention.packed`. A CPU has fast matrix products for bf16, but a slow backward pass of its attention kernel, and
one kernel call per short sample costs more than its arithmetic. No sample sees another, and no mask of T x T exists. Segments that
continue a shared prefix (`trainer.prefixes`) read its keys and values, and add to their gradients.

Legend: T tokens of a row, B segments of a group, L its longest, P its longest prefix, K key-value heads, G query heads of each,
D head dimension; M = B * K matrices, Q = query tokens of a block, E = key tokens up to the end of the block, the prefix included.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_BLOCK_TOKENS = 256
"""Query tokens that are computed at once, against the keys up to their end. This saves about half of a long sample's products."""
_MIN_LENGTH_SHARE = 0.75
"""Least length of a segment in a group, as a share of the longest; `_FREE_PADDING_TOKENS` lets shorter ones in too."""
_FREE_PADDING_TOKENS = 48
"""Tokens of padding that cost less than one more group would."""
_LENGTH_MULTIPLE = 32
"""A group's length is a multiple of this: matrix products and softmax of odd lengths take a CPU twice as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedGroup:
    """Segments that are padded to one length, behind prefixes that are padded to one length.

    Padding of a segment lies behind it, where causal attention does not look. Padding of a prefix lies before it, and is masked.
    """

    num_segments: int
    length: int
    tokens: torch.Tensor
    """int64 [B * L]: the token of the row in each place; in padding, the segment's last."""
    padding: torch.Tensor | None
    """bool [B * L, 1]; None when there is none."""
    prefix_length: int
    """P; 0 when the segments begin their samples."""
    key_tokens: torch.Tensor
    """int64 [B * (P + L)]: as `tokens`, each segment behind its prefix."""
    prefix_padding: torch.Tensor | None
    """bool [B, 1, P]; None when there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The segments of one row in groups of similar length and similar prefix, each padded to its longest."""

    parts: tuple[PaddedGroup, ...]
    places: torch.Tensor
    """int64 [T]: the place of each token among those of all groups, one group behind the other."""

    @classmethod
    def of(cls, lengths: Sequence[int], prefixes: Sequence[torch.Tensor] | None = None) -> "Groups":
        """Group the segments of these lengths, in tokens.

        Args:
            prefixes: int64 [tokens of the prefix] each: the tokens of the row that a segment continues. None: there are none.
        """
        starts = torch.tensor([0, *lengths]).cumsum(0)
        prefixes = prefixes or [torch.empty(0, dtype=torch.int64)] * len(lengths)
        lengths_S = torch.tensor(lengths)
        parts: list[PaddedGroup] = []
        places = torch.empty(int(starts[-1]), dtype=torch.int64)
        place = 0
        for members in _group(lengths, [len(prefix) for prefix in prefixes]):
            longest = -(-max(lengths[member] for member in members) // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
            index_1L, lengths_B1 = torch.arange(longest)[None], lengths_S[members][:, None]
            is_padding_BL = index_1L >= lengths_B1
            tokens_BL = starts[members][:, None] + torch.minimum(index_1L, lengths_B1 - 1)
            places[tokens_BL[~is_padding_BL]] = place + torch.nonzero(~is_padding_BL.flatten())[:, 0]
            place += tokens_BL.numel()
            prefix_BP, prefix_padding = _align([prefixes[member] for member in members])
            parts.append(
                PaddedGroup(
                    num_segments=len(members),
                    length=longest,
                    tokens=tokens_BL.flatten(),
                    padding=is_padding_BL.reshape(-1, 1) if bool(is_padding_BL.any()) else None,
                    prefix_length=prefix_BP.shape[1],
                    key_tokens=torch.cat([prefix_BP, tokens_BL], dim=1).flatten(),
                    prefix_padding=prefix_padding,
                )
            )
        return cls(parts=tuple(parts), places=places)


def _group(lengths: Sequence[int], prefix_lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield the indices of the segments of each group. Segments with a prefix and without one are never in one group."""
    by_prefix: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-prefix_lengths[i], -lengths[i])):
        if by_prefix and not _is_near(prefix_lengths[index], prefix_lengths[by_prefix[0]]):
            yield from _group_by_length(by_prefix, lengths)
            by_prefix = []
        by_prefix.append(index)
    yield from _group_by_length(by_prefix, lengths)


def _group_by_length(members: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    group: list[int] = []
    for index in sorted(members, key=lambda i: -lengths[i]):
        if group and not _is_near(lengths[index], lengths[group[0]]):
            yield group
            group = []
        group.append(index)
    yield group


def _is_near(length: int, longest: int) -> bool:
    """Tell whether `length` may be padded to `longest`. Nothing is padded to something."""
    return length >= min(_MIN_LENGTH_SHARE * longest, longest - _FREE_PADDING_TOKENS) and (length > 0) == (longest > 0)


def _align(prefixes: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the prefixes [B, P] with padding before the shorter ones, and where it is: bool [B, 1, P], None when nowhere."""
    longest = max(map(len, prefixes))
    tokens_BP = torch.zeros(len(prefixes), longest, dtype=torch.int64)
    is_padding_BP = torch.zeros(len(prefixes), longest, dtype=torch.bool)
    for row, prefix in enumerate(prefixes):
        num_padding = longest - len(prefix)
        tokens_BP[row, num_padding:] = prefix
        is_padding_BP[row, :num_padding] = True
    return tokens_BP, is_padding_BP[:, None] if bool(is_padding_BP.any()) else None


def grouped_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, groups: Groups, *, scale: float
) -> torch.Tensor:
    """Compute causal attention within each sample.

    Args:
        query: [T, K * G, D]; key [T, K, D]; value [T, K, D], where D may be another one.

    Returns:
        [T, K * G, D] with the value's D.
    """
    return _GroupedAttention.apply(query, key, value, groups, scale)  # type: ignore[no-any-return]  # apply is untyped


class _GroupedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, groups: Groups, scale: float
    ) -> torch.Tensor:
        saved: list[torch.Tensor] = []
        outputs: list[torch.Tensor] = []
        for group in groups.parts:
            query_MGLD, key_MED, value_MED = _gather(group, query, key, value)
            blocks = []
            for start, stop in _blocks(group.length):
                end = group.prefix_length + stop
                probabilities = _probabilities(query_MGLD[:, :, start:stop], key_MED[:, :end], group, scale=scale)
                blocks.append(torch.bmm(probabilities, value_MED[:, :end]).unflatten(1, (-1, stop - start)))
                if _keeps_probabilities(group):
                    saved.append(probabilities)
            outputs.append(_to_rows(blocks, group))
        ctx.save_for_backward(query, key, value, *saved)
        ctx.groups, ctx.scale = groups, scale
        return _in_row_order(outputs, groups).view(*query.shape[:-1], value.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        query, key, value, *saved = ctx.saved_tensors
        segment_grads: tuple[list[torch.Tensor], ...] = ([], [], [])
        of_prefixes: list[tuple[PaddedGroup, torch.Tensor, torch.Tensor]] = []
        for group in ctx.groups.parts:
            tensors = _gather(group, query, key, value)
            grad_MGLD = _per_key_head(_pick(grads[0], group), group, num_kv_heads=key.shape[1])
            probabilities = saved.pop(0) if _keeps_probabilities(group) else None
            grad_query, grad_key_MED, grad_value_MED = _backward(group, tensors, grad_MGLD, probabilities, ctx.scale)
            segment_grads[0].append(grad_query)
            for parts, grad_MED in zip(segment_grads[1:], (grad_key_MED, grad_value_MED), strict=True):
                parts.append(_to_rows([grad_MED[:, None, group.prefix_length :].to(key.dtype)], group))
            if group.prefix_length:
                of_prefixes.append((group, grad_key_MED, grad_value_MED))
        shapes = (query.shape, key.shape, value.shape)
        grad_q, grad_k, grad_v = (_in_row_order(p, ctx.groups).view(s) for p, s in zip(segment_grads, shapes, strict=True))
        if of_prefixes:
            grad_k = _add_prefixes(grad_k, [(group, grad) for group, grad, _ in of_prefixes])
            grad_v = _add_prefixes(grad_v, [(group, grad) for group, _, grad in of_prefixes])
        return grad_q, grad_k, grad_v, None, None


def _keeps_probabilities(group: PaddedGroup) -> bool:
    """Tell whether backward reads the probabilities again: of more keys they would take more memory than they save time."""
    return group.prefix_length + group.length <= _BLOCK_TOKENS


def _backward(
    group: PaddedGroup,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    grad_MGLD: torch.Tensor,
    saved: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of the queries, [B * L, K * G * D], and of keys and values with the prefix, [M, P + L, D]."""
    query_MGLD, key_MED, value_MED = tensors
    grad_queries: list[torch.Tensor] = []
    sums: tuple[torch.Tensor, torch.Tensor] | None = None
    # From the last block, whose keys are all of them, to the first.
    for start, stop in reversed(list(_blocks(group.length))):
        end = group.prefix_length + stop
        block_MGQD, block_key_MED, block_value_MED = query_MGLD[:, :, start:stop], key_MED[:, :end], value_MED[:, :end]
        probabilities = _probabilities(block_MGQD, block_key_MED, group, scale=scale) if saved is None else saved
        grad_MQD = grad_MGLD[:, :, start:stop].flatten(1, 2)
        grad_scores = torch.ops.aten._softmax_backward_data(
            torch.bmm(grad_MQD, block_value_MED.transpose(1, 2)), probabilities, -1, probabilities.dtype
        )
        grad_queries.append(_scaled_bmm(grad_scores, block_key_MED, scale=scale).unflatten(1, (-1, stop - start)))
        grad_key = _scaled_bmm(grad_scores.transpose(1, 2), block_MGQD.flatten(1, 2), scale=scale)
        grad_value = torch.bmm(probabilities.transpose(1, 2), grad_MQD)
        if sums is None:
            # Many blocks are not summed in bf16.
            sums = (grad_key, grad_value) if start == 0 else (_widened(grad_key), _widened(grad_value))
        else:
            sums[0][:, :end] += grad_key
            sums[1][:, :end] += grad_value
    assert sums is not None
    return _to_rows(grad_queries[::-1], group), *sums


def _add_prefixes(grad: torch.Tensor, parts: Sequence[tuple[PaddedGroup, torch.Tensor]]) -> torch.Tensor:
    """Add to the gradient of keys or values [T, K, D] what segments give to their prefixes; each part is [M, P + L, D].

    The gradient of padding is 0: its probabilities are.
    """
    total = _widened(grad.flatten(1))  # many segments of one prefix are not summed in bf16
    for group, grad_MED in parts:
        size, num_tokens = group.prefix_length, group.num_segments * group.prefix_length
        of_prefix = grad_MED[:, :size].unflatten(0, (group.num_segments, -1)).transpose(1, 2).reshape(num_tokens, -1)
        tokens = group.key_tokens.view(group.num_segments, -1)[:, :size].flatten()
        total.index_add_(0, tokens, of_prefix.to(total.dtype))
    return total.to(grad.dtype).view(grad.shape)


def _widened(values: torch.Tensor) -> torch.Tensor:
    return values.float() if values.dtype == torch.bfloat16 else values


def _scaled_bmm(left: torch.Tensor, right: torch.Tensor, *, scale: float) -> torch.Tensor:
    return torch.baddbmm(left.new_empty(1, 1, 1), left, right, beta=0, alpha=scale)


def _in_row_order(parts: Sequence[torch.Tensor], groups: Groups) -> torch.Tensor:
    whole = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    return whole.index_select(0, groups.places)


def _blocks(length: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + _BLOCK_TOKENS, length)) for start in range(0, length, _BLOCK_TOKENS))


def _probabilities(query_MGQD: torch.Tensor, key_MED: torch.Tensor, group: PaddedGroup, *, scale: float) -> torch.Tensor:
    """Return [M, G * Q, E] in the dtype of the query; exponents and sums of bf16 are taken in float32."""
    num_queries = query_MGQD.shape[2]
    scores = _scaled_bmm(query_MGQD.flatten(1, 2), key_MED.transpose(1, 2), scale=scale)
    future_QQ = torch.ones(num_queries, num_queries, dtype=torch.bool).triu_(1)
    scores.unflatten(1, (-1, num_queries))[..., -num_queries:].masked_fill_(future_QQ, -torch.inf)
    if group.prefix_padding is not None:
        by_segment = scores.unflatten(0, (group.num_segments, -1)).flatten(1, 2)
        by_segment[..., : group.prefix_length].masked_fill_(group.prefix_padding, -torch.inf)
    return torch.softmax(scores, dim=-1)


def _gather(
    group: PaddedGroup, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the group's queries as [M, G, L, D], its keys and values, behind those of the prefixes, as [M, P + L, D]."""

    def pick(tensor: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        picked = tensor.reshape(len(tensor), -1).index_select(0, tokens).view(-1, *tensor.shape[1:])
        return _per_key_head(picked, group, num_kv_heads=key.shape[1])

    return pick(query, group.tokens), pick(key, group.key_tokens)[:, 0], pick(value, group.key_tokens)[:, 0]


def _pick(grad: torch.Tensor, group: PaddedGroup) -> torch.Tensor:
    """Select the places of a group; its padding is 0, so that it contributes no gradient."""
    picked = grad.reshape(len(grad), -1).index_select(0, group.tokens)
    if group.padding is not None:
        picked.masked_fill_(group.padding, 0.0)
    return picked.view(-1, *grad.shape[1:])


def _per_key_head(rows: torch.Tensor, group: PaddedGroup, *, num_kv_heads: int) -> torch.Tensor:
    """Turn [B * L, K * G, D] into [M, G, L, D], contiguous; keys have P + L in the place of L."""
    split = rows.view(group.num_segments, -1, num_kv_heads, rows.shape[1] // num_kv_heads, rows.shape[-1])
    return split.permute(0, 2, 3, 1, 4).contiguous().flatten(0, 1)


def _to_rows(blocks: Sequence[torch.Tensor], group: PaddedGroup) -> torch.Tensor:
    """Turn blocks of [M, G, Q, D] back into [B * L, K * G * D]."""
    whole = blocks[0] if len(blocks) == 1 else torch.cat(list(blocks), dim=2)
    split = whole.unflatten(0, (group.num_segments, -1))
    return split.permute(0, 3, 1, 2, 4).reshape(group.num_segments * group.length, -1)
