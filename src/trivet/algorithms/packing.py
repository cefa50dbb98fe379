"""Packs samples into rows of at most `seq_len` tokens, and divides rows among ranks.

Ranks compute row by row in lock step, so a good division has equally many rows on every rank, rows of similar cost at the same
place, and similar sums. Every rank comes to the same division.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trivet.wire.batches import MicroBatch
from trivet.wire.rollouts import Sample
from trivet.wire.versions import count_tokens, first_versions


@dataclass(frozen=True, slots=True, kw_only=True)
class PackItem:
    """A sample with the advantage of its rollout."""

    sample: Sample
    advantage: float


def first_fit_decreasing(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Place items, longest first, each into the first bin with room; return the bins as lists of item indices.

    Ties keep the input's order, so equal input gives equal rows.

    Source: first-fit decreasing needs at most 11/9 of the optimal number of bins, plus 6/9 (Dosa 2007).
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > capacity:
            raise ValueError(f"item of {length} tokens does not fit a row of {capacity}")
        for place, free in enumerate(room):
            if length <= free:
                bins[place].append(index)
                room[place] -= length
                break
        else:
            bins.append([index])
            room.append(capacity - length)
    return bins


def truncate(sample: Sample, *, seq_len: int) -> Sample:
    """Return the first `seq_len` tokens of `sample` with the versions of those sampled; `sample` itself when it is not longer."""
    if sample.num_tokens <= seq_len:
        return sample
    num_cut = int(np.count_nonzero(sample.loss_mask_T[seq_len:]))
    return Sample(
        token_ids_T=sample.token_ids_T[:seq_len],
        loss_mask_T=sample.loss_mask_T[:seq_len],
        logprobs_T=sample.logprobs_T[:seq_len],
        teacher_logprobs_T=None if sample.teacher_logprobs_T is None else sample.teacher_logprobs_T[:seq_len],
        versions=first_versions(sample.versions, count_tokens(sample.versions) - num_cut),
        temperature=sample.temperature,
        is_truncated=True,
    )


def pack(items: Sequence[PackItem], *, seq_len: int, row_len: int | None = None) -> list[MicroBatch]:
    """Pack samples, cut to `seq_len`, into rows by first-fit decreasing; samples without loss tokens are left out.

    Args:
        row_len: tokens of a row, at least `seq_len`, which it is when None.
    """
    kept = _trainable(items, seq_len=seq_len)
    bins = first_fit_decreasing([sample.num_tokens for sample, _ in kept], capacity=row_len or seq_len)
    return [_join([kept[index] for index in bin_]) for bin_ in bins]


def stack(items: Sequence[PackItem], *, seq_len: int, samples_per_row: int) -> list[MicroBatch]:
    """Return rows of `samples_per_row` samples of similar length, cut to `seq_len`; samples without loss tokens are left out."""
    kept = sorted(_trainable(items, seq_len=seq_len), key=lambda member: -member[0].num_tokens)
    return [_join(kept[start : start + samples_per_row]) for start in range(0, len(kept), samples_per_row)]


def _trainable(items: Sequence[PackItem], *, seq_len: int) -> list[tuple[Sample, float]]:
    cut = [(truncate(item.sample, seq_len=seq_len), item.advantage) for item in items]
    return [(sample, advantage) for sample, advantage in cut if sample.num_loss_tokens]


def _join(members: Sequence[tuple[Sample, float]]) -> MicroBatch:
    samples = [sample for sample, _ in members]
    teachers = [sample.teacher_logprobs_T for sample in samples if sample.teacher_logprobs_T is not None]
    lengths_S = np.array([sample.num_tokens for sample in samples], dtype=np.int32)
    return MicroBatch(
        token_ids_T=np.concatenate([sample.token_ids_T for sample in samples]).astype(np.int32),
        position_ids_T=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths_S]),
        loss_mask_T=np.concatenate([sample.loss_mask_T for sample in samples]).astype(np.bool_),
        logprobs_T=np.concatenate([sample.logprobs_T for sample in samples]).astype(np.float32),
        advantages_T=np.repeat(np.array([advantage for _, advantage in members], dtype=np.float32), lengths_S),
        temperatures_T=np.repeat(np.array([sample.temperature for sample in samples], dtype=np.float32), lengths_S),
        sequence_lengths_S=lengths_S,
        teacher_logprobs_T=np.concatenate(teachers).astype(np.float32) if len(teachers) == len(samples) else None,
    )


def arrange(
    rows: Sequence[Sequence[int]],
    lengths: Sequence[int],
    *,
    costs: Sequence[float],
    num_ranks: int,
    max_tokens: int | None = None,
) -> list[list[list[int]]]:
    """Return the rows of each rank, the one with the most tokens first: if memory does not suffice, that shows at once.

    Without `max_tokens` rows stay as they are, but for as many as must be divided to give every rank equally many. A rank has one
    row less than others only when there is no row left to divide.

    Args:
        rows: indices of items, each item in one row. An item is a sample, or samples that must stay together.
        lengths, costs: tokens and cost of each item. The cost of a row is the sum over its items.
        max_tokens: pack all items again, into rows of at most this many tokens; a longer item gets a row of its own.
    """
    packed = [list(row) for row in rows] if max_tokens is None else repack(lengths, max_tokens=max_tokens)
    packed = divide(packed, lengths, multiple_of=num_ranks, costs=costs)
    dealt = deal([_sum_of(costs, row) for row in packed], num_ranks=num_ranks)
    return [sorted((packed[place] for place in places), key=lambda row: -_sum_of(lengths, row)) for places in dealt]


def _sum_of(values: Sequence[float], row: Sequence[int]) -> float:
    return sum(values[index] for index in row)


def repack(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Pack all items into rows of at most `max_tokens`; a longer item gets a row of its own."""
    long = [[index] for index, length in enumerate(lengths) if length > max_tokens]
    short = [index for index, length in enumerate(lengths) if length <= max_tokens]
    bins = first_fit_decreasing([lengths[index] for index in short], capacity=max_tokens)
    return long + [[short[place] for place in bin_] for bin_ in bins]


def divide(rows: Sequence[list[int]], lengths: Sequence[int], *, multiple_of: int, costs: Sequence[float]) -> list[list[int]]:
    """Divide the most costly rows of several items until their number is a multiple, or none can be divided."""
    divided = list(rows)
    while len(divided) % multiple_of:
        candidates = [place for place, row in enumerate(divided) if len(row) > 1]
        if not candidates:
            break
        row = divided.pop(max(candidates, key=lambda place: _sum_of(costs, divided[place])))
        halves: list[list[int]] = [[], []]
        for index in sorted(row, key=lambda item: -lengths[item]):  # the longest first, each to the half with fewer tokens
            min(halves, key=lambda half: _sum_of(lengths, half)).append(index)
        divided += halves
    return divided


def deal(costs: Sequence[float], *, num_ranks: int) -> list[list[int]]:
    """Deal rows in rounds of one row a rank, the most costly first; in a round the most costly goes to the rank with the least.

    Two ranks' sums never differ by more than the largest cost: a round in which costs differ by d leaves the difference at
    most the larger of d and what it was, because the more costly row goes where less is. The rows of a round are neighbours by
    cost, so no rank waits long for another within it.
    """
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    sums = [0.0] * num_ranks
    order = sorted(range(len(costs)), key=lambda index: (-costs[index], index))
    for start in range(0, len(order), num_ranks):
        ranks = sorted(range(num_ranks), key=lambda rank: (sums[rank], rank))
        for rank, index in zip(ranks, order[start : start + num_ranks], strict=False):
            dealt[rank].append(index)
            sums[rank] += costs[index]
    return dealt
