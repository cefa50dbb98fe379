"""Decides which samples of a batch share a row, and which rank computes it.

Called by `trainer.rows`, on every rank with the same result.

Ranks compute row by row in lock step, so a good deal has equally many rows on every rank, rows of similar cost at the same place,
and similar sums.
"""

from collections.abc import Sequence

from trivet.algorithms.packing import first_fit_decreasing


def arrange(
    rows: Sequence[Sequence[int]],
    lengths: Sequence[int],
    *,
    costs: Sequence[float],
    num_ranks: int,
    max_tokens: int | None = None,
) -> list[list[list[int]]]:
    """Return the rows of each rank, the one with the most tokens first: if memory does not suffice, that shows at once.

    Without `max_tokens` rows stay as they are, but for as many as must be divided to give every rank equally many.

    Args:
        rows: indices of items, each item in one row. An item is a sample, or samples that must stay together.
        lengths: tokens of each item.
        costs: the cost of each item. The cost of a row is their sum.
        max_tokens: pack all items again, into rows of at most this many tokens; a longer item gets a row of its own.

    Returns:
        The rows of each rank. A rank has one row less than others only when there is no row left to divide.
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

    Returns:
        Indices of each rank, the most costly first.
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
