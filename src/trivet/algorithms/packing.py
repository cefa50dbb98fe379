"""Packs samples into rows of at most `seq_len` tokens."""

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
    """Place items, longest first, each into the first bin with room.

    Args:
        lengths: each at most `capacity`.

    Returns:
        Bins as lists of item indices. Ties keep the input's order, so equal input gives equal rows.

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
