"""Packs samples into rows of at most `seq_len` tokens, and divides rows among ranks.

Called by the orchestrator, which packs a batch, and by the trainer, which divides it among ranks. Ranks compute row by row in lock
step. So a good division has equally many rows on every rank, similar costs of the n-th row of all ranks, and similar sums of costs.
Equal input gives an equal division, so every rank computes the same one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trivet.wire.batches import MicroBatch
from trivet.wire.rollouts import Sample, TurnRun
from trivet.wire.versions import count_tokens, first_versions


@dataclass(frozen=True, slots=True, kw_only=True)
class PackItem:
    """A sample with the advantage of its rollout, which counts for all tokens of a sample without `advantages_T`."""

    sample: Sample
    advantage: float


def first_fit_decreasing(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Put items, longest first, each into the first bin with enough free capacity; return the bins as lists of item indices.

    Items of equal length keep their order, so equal input gives equal bins.

    Source: first-fit decreasing needs at most 11/9 of the optimal number of bins, plus 6/9 (Dosa 2007).
    """
    bins: list[list[int]] = []
    free_capacities: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > capacity:
            raise ValueError(f"item of {length} tokens does not fit a row of {capacity}")
        for bin_index, free in enumerate(free_capacities):
            if length <= free:
                bins[bin_index].append(index)
                free_capacities[bin_index] -= length
                break
        else:
            bins.append([index])
            free_capacities.append(capacity - length)
    return bins


def truncate(sample: Sample, *, seq_len: int) -> Sample:
    """Return `sample` cut to its first `seq_len` tokens and their policy versions, or `sample` itself if it is not longer."""
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
        turns=_first_turns(sample.turns, int(np.count_nonzero(sample.loss_mask_T[:seq_len]))),
        agent=sample.agent,
        advantages_T=None if sample.advantages_T is None else sample.advantages_T[:seq_len],
        is_truncated=True,
        experts=sample.experts,
    )


def _first_turns(runs: Sequence[TurnRun], num_tokens: int) -> list[TurnRun]:
    """Return the turns of the first `num_tokens` tokens to train on."""
    kept: list[TurnRun] = []
    for run in runs:
        length = min(run.length, num_tokens)
        if length:
            kept.append(TurnRun(run.turn, length))
        num_tokens -= length
    return kept


def pack(items: Sequence[PackItem], *, seq_len: int, row_len: int | None = None) -> list[MicroBatch]:
    """Pack samples, cut to `seq_len`, into rows by first-fit decreasing; samples without loss tokens are left out.

    Args:
        row_len: most tokens of a row, at least `seq_len`; None: `seq_len`.
    """
    kept = _cut_items(items, seq_len=seq_len)
    bins = first_fit_decreasing([item.sample.num_tokens for item in kept], capacity=row_len or seq_len)
    return [_join([kept[index] for index in indices]) for indices in bins]


def stack(items: Sequence[PackItem], *, seq_len: int, samples_per_row: int) -> list[MicroBatch]:
    """Return rows of `samples_per_row` samples of similar length, cut to `seq_len`; samples without loss tokens are left out."""
    kept = sorted(_cut_items(items, seq_len=seq_len), key=lambda item: -item.sample.num_tokens)
    return [_join(kept[start : start + samples_per_row]) for start in range(0, len(kept), samples_per_row)]


def _cut_items(items: Sequence[PackItem], *, seq_len: int) -> list[PackItem]:
    """Cut samples to `seq_len`, and leave out samples without loss tokens."""
    cut = [PackItem(sample=truncate(item.sample, seq_len=seq_len), advantage=item.advantage) for item in items]
    return [item for item in cut if item.sample.num_loss_tokens]


def _join(items: Sequence[PackItem]) -> MicroBatch:
    """Make one row of `items`, in this order."""
    samples = [item.sample for item in items]
    teachers = [sample.teacher_logprobs_T for sample in samples if sample.teacher_logprobs_T is not None]
    lengths_S = np.array([sample.num_tokens for sample in samples], dtype=np.int32)
    return MicroBatch(
        token_ids_T=np.concatenate([sample.token_ids_T for sample in samples]).astype(np.int32),
        position_ids_T=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths_S]),
        loss_mask_T=np.concatenate([sample.loss_mask_T for sample in samples]).astype(np.bool_),
        logprobs_T=np.concatenate([sample.logprobs_T for sample in samples]).astype(np.float32),
        advantages_T=np.concatenate([_advantages_of(item) for item in items]),
        temperatures_T=np.repeat(np.array([sample.temperature for sample in samples], dtype=np.float32), lengths_S),
        sequence_lengths_S=lengths_S,
        teacher_logprobs_T=np.concatenate(teachers).astype(np.float32) if len(teachers) == len(samples) else None,
        experts_S=[sample.experts for sample in samples] if any(sample.experts is not None for sample in samples) else [],
    )


def _advantages_of(item: PackItem) -> np.ndarray:
    advantages_T = item.sample.advantages_T
    return np.full(item.sample.num_tokens, item.advantage, dtype=np.float32) if advantages_T is None else advantages_T


def arrange(
    rows: Sequence[Sequence[int]],
    lengths: Sequence[int],
    *,
    costs: Sequence[float],
    num_ranks: int,
    max_tokens: int | None = None,
) -> list[list[list[int]]]:
    """Return the rows of each rank, the row with the most tokens first, because it shows at once whether memory suffices.

    Without `max_tokens` rows stay as they are, except for rows that are divided so that every rank has equally many. A rank has one
    row less than others only if no row is left that can be divided.

    Args:
        rows: indices of items, each item in one row. An item is a sample, or samples that must stay together.
        lengths, costs: tokens and cost of each item. The cost of a row is the sum over its items.
        max_tokens: pack all items again, into rows of at most this many tokens; a longer item is a row alone.
    """
    packed = [list(row) for row in rows] if max_tokens is None else repack(lengths, max_tokens=max_tokens)
    divided = divide(packed, lengths, multiple_of=num_ranks, costs=costs)
    indices_by_rank = deal([_sum_of(costs, row) for row in divided], num_ranks=num_ranks)
    return [
        sorted((divided[index] for index in indices), key=lambda row: -_sum_of(lengths, row)) for indices in indices_by_rank
    ]


def _sum_of(values: Sequence[float], row: Sequence[int]) -> float:
    return sum(values[index] for index in row)


def repack(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Pack all items into rows of at most `max_tokens`; a longer item is a row alone."""
    long_rows = [[index] for index, length in enumerate(lengths) if length > max_tokens]
    short = [index for index, length in enumerate(lengths) if length <= max_tokens]
    bins = first_fit_decreasing([lengths[index] for index in short], capacity=max_tokens)
    return long_rows + [[short[position] for position in positions] for positions in bins]


def divide(rows: Sequence[list[int]], lengths: Sequence[int], *, multiple_of: int, costs: Sequence[float]) -> list[list[int]]:
    """Divide the most costly rows in two until the number of rows is a multiple of `multiple_of`. A row of one item stays."""
    divided = list(rows)
    while len(divided) % multiple_of:
        candidates = [index for index, row in enumerate(divided) if len(row) > 1]
        if not candidates:
            break
        row = divided.pop(max(candidates, key=lambda index: _sum_of(costs, divided[index])))
        halves: list[list[int]] = [[], []]
        for index in sorted(row, key=lambda item: -lengths[item]):  # the longest first, each to the half with fewer tokens
            min(halves, key=lambda half: _sum_of(lengths, half)).append(index)
        divided += halves
    return divided


def deal(costs: Sequence[float], *, num_ranks: int) -> list[list[int]]:
    """Assign rows to ranks in rounds of one row for each rank, and return the indices of each rank's rows.

    The most costly rows come first. In a round the most costly row goes to the rank with the smallest sum of costs so far. So two
    sums never differ by more than the largest cost: if the costs of a round differ by at most d, the difference of two sums is
    afterwards at most the larger of d and the difference before. The rows of a round have similar costs, so no rank waits long for
    another one.
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
