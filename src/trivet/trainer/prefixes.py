"""Finds the prefixes that samples share, so that the trainer computes the tokens of a shared prefix once.

Used by `trainer.rows`. The rollouts of a group share their prompt, and the branches of a conversation share its past. Samples with
a shared prefix form a tree of segments: a segment holds tokens that the same samples share, and continues its parent segment. A
causal model gives a token the same hidden state in every sample that has the same tokens before it, so the result does not change.
The functions are pure and work on arrays.

Legend: T tokens of all samples in sequence, U tokens to compute: a token that samples share counts once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MIN_SAVED_TOKENS = 16
"""A prefix is shared if that saves at least this many tokens, over all its samples: one more segment costs about as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTree:
    """The segments of some samples. A segment comes after its parent."""

    parents: tuple[int, ...]
    """For each segment the index of its parent, which it continues; -1 for a segment that begins a sample."""
    lengths: tuple[int, ...]
    """Tokens of each segment, without its prefix."""
    prefix_lengths: tuple[int, ...]
    """For each segment the number of tokens before it, in its parent and the parents of that."""
    sources_U: np.ndarray
    """int64 [U]: for each token to compute, its index among the samples' tokens."""
    computed_indices_T: np.ndarray
    """int64 [T]: for each token of the samples, its index among the tokens to compute."""

    @property
    def num_tokens(self) -> int:
        """Tokens to compute, U."""
        return len(self.sources_U)

    def path(self, segment: int) -> list[int]:
        """Return the segments that `segment` continues, the one that begins the sample first."""
        path: list[int] = []
        while (segment := self.parents[segment]) >= 0:
            path.append(segment)
        return path[::-1]


def order_by_tokens(samples: Sequence[np.ndarray]) -> tuple[list[int], list[int]]:
    """Order samples, integers [tokens of the sample], so that samples with a shared prefix are neighbours.

    Returns the indices of the samples in this order, and for each the number of tokens that it shares with its predecessor.
    """
    keys = [np.ascontiguousarray(sample).tobytes() for sample in samples]
    order = sorted(range(len(samples)), key=keys.__getitem__)
    shared = [0] * len(order)
    for position in range(1, len(order)):
        before, sample = samples[order[position - 1]], samples[order[position]]
        length = min(len(before), len(sample))
        differs = before[:length] != sample[:length]
        shared[position] = int(differs.argmax()) if differs.any() else length
    return order, shared


def group_by_prefix(samples: Sequence[np.ndarray], *, max_tokens: int) -> list[list[int]]:
    """Group samples that share a prefix, so that a group has at most `max_tokens` tokens to compute.

    Returns the indices of the samples of each group. A sample that shares nothing, or exceeds `max_tokens`, is a group of its own.
    """
    groups: list[list[int]] = []
    num_tokens = 0
    for index, shared in zip(*order_by_tokens(samples), strict=True):
        added = len(samples[index]) - shared
        if groups and shared >= MIN_SAVED_TOKENS and num_tokens + added <= max_tokens:
            groups[-1].append(index)
            num_tokens += added
        else:
            groups.append([index])
            num_tokens = len(samples[index])
    return [part for group in groups for part in _divide(group, samples, max_tokens=max_tokens)]


def _divide(group: list[int], samples: Sequence[np.ndarray], *, max_tokens: int) -> list[list[int]]:
    """Divide a group whose tree has more than `max_tokens`.

    `group_by_prefix` counts fewer tokens than the tree has, because the tree does not share a prefix that saves too little.
    """
    kept, rest = list(group), list[int]()
    while len(kept) > 1 and build_tree([samples[index] for index in kept]).num_tokens > max_tokens:
        rest.insert(0, kept.pop())
    return [kept, *_divide(rest, samples, max_tokens=max_tokens)] if rest else [kept]


def build_tree(samples: Sequence[np.ndarray]) -> PrefixTree:
    """Return the segments of `samples`, integers [tokens of the sample] each."""
    order, shared = order_by_tokens(samples)
    if not any(shared):
        return flat_tree(samples)
    starts = np.cumsum([0, *map(len, samples)])
    computed_indices_T = np.empty(starts[-1], dtype=np.int64)
    sources: list[np.ndarray] = []
    parents: list[int] = []
    lengths: list[int] = []
    prefix_lengths: list[int] = []

    def add(first: int, stop: int, *, begin: int, end: int, parent: int) -> int:
        """Add tokens `begin` to `end` of the samples order[first:stop] as one segment; return its index."""
        num_before = sum(lengths)
        for index in order[first:stop]:
            computed_indices_T[starts[index] + begin : starts[index] + end] = np.arange(num_before, num_before + end - begin)
        sources.append(np.arange(begin, end) + starts[order[first]])
        parents.append(parent)
        lengths.append(end - begin)
        prefix_lengths.append(begin)
        return len(lengths) - 1

    # An entry (first, stop, begin, parent) is about the samples order[first:stop]. Their tokens before `begin` are in segments
    # already, the last of which is `parent`.
    pending = [(0, len(order), 0, -1)]
    while pending:
        first, stop, begin, parent = pending.pop()
        if stop - first == 1:
            if (end := len(samples[order[first]])) > begin:
                add(first, stop, begin=begin, end=end, parent=parent)
            continue
        common = min(shared[first + 1 : stop])
        if (common - begin) * (stop - first - 1) >= MIN_SAVED_TOKENS:
            begin, parent = common, add(first, stop, begin=begin, end=common, parent=parent)
        branches = [first, *(position for position in range(first + 1, stop) if shared[position] == common)]
        parts = list(zip(branches, [*branches[1:], stop], strict=True))
        pending += [(start, end, begin, parent) for start, end in reversed(parts)]
    if not any(parent >= 0 for parent in parents) and len(lengths) == len(samples):
        return flat_tree(samples)  # in the order given
    return PrefixTree(
        parents=tuple(parents),
        lengths=tuple(lengths),
        prefix_lengths=tuple(prefix_lengths),
        sources_U=np.concatenate(sources),
        computed_indices_T=computed_indices_T,
    )


def flat_tree(samples: Sequence[np.ndarray]) -> PrefixTree:
    """Return the segments of samples that share nothing: each sample is a segment, in the order given."""
    computed_indices_T = np.arange(sum(map(len, samples)))
    return PrefixTree(
        parents=(-1,) * len(samples),
        lengths=tuple(map(len, samples)),
        prefix_lengths=(0,) * len(samples),
        sources_U=computed_indices_T,
        computed_indices_T=computed_indices_T,
    )
