"""Attention over packed rows by matrix products, for the CPU: samples of similar length are computed at once.

Called by `trainer.attention.packed`. A CPU has fast matrix products for bf16, but a slow backward pass of its attention kernel, and
one kernel call per short sample costs more than its arithmetic. No sample sees another, and no mask of T x T exists.
docs/benchmarks/cpu_mechanisms_grouped_lanes.json compares a step with one that calls torch's kernel sample by sample.

Legend: T tokens of a row, B samples of a group, L its longest, K key-value heads, G query heads of each, D head dimension;
M = B * K matrices, Q = query tokens of a block, E = key tokens up to the end of the block.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_BLOCK_TOKENS = 256
"""Query tokens that are computed at once, against the keys up to their end. This saves about half of a long sample's products."""
_MIN_LENGTH_SHARE = 0.75
"""Least length of a sample in a group, as a share of the longest; `_FREE_PADDING_TOKENS` lets shorter ones in too."""
_FREE_PADDING_TOKENS = 48
"""Tokens of padding that cost less than one more group would."""
_LENGTH_MULTIPLE = 32
"""A group's length is a multiple of this: matrix products and softmax of odd lengths take a CPU twice as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedGroup:
    """Samples that are padded to one length. Padding lies behind a sample, where causal attention does not look."""

    num_samples: int
    length: int
    tokens: torch.Tensor
    """int64 [B * L]: the token of the row in each place; in padding, the sample's last."""
    padding: torch.Tensor | None
    """bool [B * L, 1]; None when there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The samples of one row in groups of similar length, each padded to its longest."""

    parts: tuple[PaddedGroup, ...]
    places: torch.Tensor
    """int64 [T]: the place of each token among those of all groups, one group behind the other."""

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "Groups":
        """Group the samples of these lengths, in tokens."""
        starts = torch.tensor([0, *lengths]).cumsum(0)
        lengths_S = torch.tensor(lengths)
        parts: list[PaddedGroup] = []
        places = torch.empty(int(starts[-1]), dtype=torch.int64)
        place = 0
        for members in _group(lengths):
            longest = -(-lengths[members[0]] // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
            index_1L, lengths_B1 = torch.arange(longest)[None], lengths_S[members][:, None]
            is_padding_BL = index_1L >= lengths_B1
            tokens_BL = starts[members][:, None] + torch.minimum(index_1L, lengths_B1 - 1)
            places[tokens_BL[~is_padding_BL]] = place + torch.nonzero(~is_padding_BL.flatten())[:, 0]
            place += tokens_BL.numel()
            padding = is_padding_BL.reshape(-1, 1) if bool(is_padding_BL.any()) else None
            parts.append(PaddedGroup(num_samples=len(members), length=longest, tokens=tokens_BL.flatten(), padding=padding))
        return cls(parts=tuple(parts), places=places)


def _group(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield the indices of each group's samples, the longest sample first."""
    members: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[members[0]] if members else 0
        if members and lengths[index] < min(_MIN_LENGTH_SHARE * longest, longest - _FREE_PADDING_TOKENS):
            yield members
            members = []
        members.append(index)
    yield members


def grouped_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, groups: Groups, *, scale: float
) -> torch.Tensor:
    """Compute causal attention within each sample.

    Args:
        query: [T, K * G, D]; key and value [T, K, D].

    Returns:
        [T, K * G, D].
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
            query_MGLD, key_MLD, value_MLD = _gather(group, query, key, value)
            blocks = []
            for start, stop in _blocks(group.length):
                probabilities = _probabilities(query_MGLD[:, :, start:stop], key_MLD[:, :stop], start=start, scale=scale)
                blocks.append(torch.bmm(probabilities, value_MLD[:, :stop]).unflatten(1, (-1, stop - start)))
                if group.length <= _BLOCK_TOKENS:
                    saved.append(probabilities)
            outputs.append(_to_rows(blocks, group))
        ctx.save_for_backward(query, key, value, *saved)
        ctx.groups, ctx.scale = groups, scale
        return _in_row_order(outputs, groups).view(query.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        query, key, value, *saved = ctx.saved_tensors
        by_group: tuple[list[torch.Tensor], ...] = ([], [], [])
        for group in ctx.groups.parts:
            tensors = _gather(group, query, key, value)
            grad_MGLD = _per_key_head(_pick(grads[0], group), group, num_kv_heads=key.shape[1])
            probabilities = saved.pop(0) if group.length <= _BLOCK_TOKENS else None
            for parts, part in zip(by_group, _backward(group, tensors, grad_MGLD, probabilities, ctx.scale), strict=True):
                parts.append(part)
        shapes = (query.shape, key.shape, value.shape)
        grad_q, grad_k, grad_v = (_in_row_order(p, ctx.groups).view(s) for p, s in zip(by_group, shapes, strict=True))
        return grad_q, grad_k, grad_v, None, None


def _backward(
    group: PaddedGroup,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    grad_MGLD: torch.Tensor,
    saved: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query_MGLD, key_MLD, value_MLD = tensors
    grad_queries: list[torch.Tensor] = []
    sums: tuple[torch.Tensor, torch.Tensor] | None = None
    # From the last block, whose keys are all of them, to the first.
    for start, stop in reversed(list(_blocks(group.length))):
        block_MGQD, key_MED, value_MED = query_MGLD[:, :, start:stop], key_MLD[:, :stop], value_MLD[:, :stop]
        probabilities = _probabilities(block_MGQD, key_MED, start=start, scale=scale) if saved is None else saved
        grad_MQD = grad_MGLD[:, :, start:stop].flatten(1, 2)
        grad_scores = torch.ops.aten._softmax_backward_data(
            torch.bmm(grad_MQD, value_MED.transpose(1, 2)), probabilities, -1, probabilities.dtype
        )
        grad_queries.append(_scaled_bmm(grad_scores, key_MED, scale=scale).unflatten(1, (-1, stop - start)))
        grad_key = _scaled_bmm(grad_scores.transpose(1, 2), block_MGQD.flatten(1, 2), scale=scale)
        grad_value = torch.bmm(probabilities.transpose(1, 2), grad_MQD)
        if sums is None:
            # Many blocks are not summed in bf16.
            sums = (grad_key, grad_value) if start == 0 else (_widened(grad_key), _widened(grad_value))
        else:
            sums[0][:, :stop] += grad_key
            sums[1][:, :stop] += grad_value
    assert sums is not None
    of_key, of_value = (_to_rows([part[:, None].to(key_MLD.dtype)], group) for part in sums)
    return _to_rows(grad_queries[::-1], group), of_key, of_value


def _widened(values: torch.Tensor) -> torch.Tensor:
    return values.float() if values.dtype == torch.bfloat16 else values


def _scaled_bmm(left: torch.Tensor, right: torch.Tensor, *, scale: float) -> torch.Tensor:
    return torch.baddbmm(left.new_empty(1, 1, 1), left, right, beta=0, alpha=scale)


def _in_row_order(parts: Sequence[torch.Tensor], groups: Groups) -> torch.Tensor:
    whole = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    return whole.index_select(0, groups.places)


def _blocks(length: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + _BLOCK_TOKENS, length)) for start in range(0, length, _BLOCK_TOKENS))


def _probabilities(query_MGQD: torch.Tensor, key_MED: torch.Tensor, *, start: int, scale: float) -> torch.Tensor:
    """Return [M, G * Q, E] in the dtype of the query; exponents and sums of bf16 are taken in float32."""
    num_queries = query_MGQD.shape[2]
    scores = _scaled_bmm(query_MGQD.flatten(1, 2), key_MED.transpose(1, 2), scale=scale)
    future_QQ = torch.ones(num_queries, num_queries, dtype=torch.bool).triu_(1)
    scores.unflatten(1, (-1, num_queries))[..., start:].masked_fill_(future_QQ, -torch.inf)
    return torch.softmax(scores, dim=-1)


def _gather(
    group: PaddedGroup, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the group's queries as [M, G, L, D], its keys and values as [M, L, D]."""
    num_kv_heads = key.shape[1]
    query_MGLD, key_MGLD, value_MGLD = (
        _per_key_head(
            t.reshape(len(t), -1).index_select(0, group.tokens).view(-1, *t.shape[1:]), group, num_kv_heads=num_kv_heads
        )
        for t in (query, key, value)
    )
    return query_MGLD, key_MGLD[:, 0], value_MGLD[:, 0]


def _pick(grad: torch.Tensor, group: PaddedGroup) -> torch.Tensor:
    """Select the places of a group; its padding is 0, so that it contributes no gradient."""
    picked = grad.reshape(len(grad), -1).index_select(0, group.tokens)
    if group.padding is not None:
        picked.masked_fill_(group.padding, 0.0)
    return picked.view(-1, *grad.shape[1:])


def _per_key_head(rows: torch.Tensor, group: PaddedGroup, *, num_kv_heads: int) -> torch.Tensor:
    """Turn [B * L, K * G, D] into [M, G, L, D], contiguous."""
    split = rows.view(group.num_samples, group.length, num_kv_heads, -1, rows.shape[-1])
    return split.permute(0, 2, 3, 1, 4).contiguous().flatten(0, 1)


def _to_rows(blocks: Sequence[torch.Tensor], group: PaddedGroup) -> torch.Tensor:
    """Turn blocks of [M, G, Q, D] back into [B * L, K * G * D]."""
    whole = blocks[0] if len(blocks) == 1 else torch.cat(list(blocks), dim=2)
    split = whole.unflatten(0, (group.num_samples, -1))
    return split.permute(0, 3, 1, 2, 4).reshape(group.num_samples * group.length, -1)
