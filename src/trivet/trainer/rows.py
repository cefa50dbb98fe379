"""Turns the packed rows of a batch into the rows that one rank computes on. Called by `trainer.step`.

Legend: T tokens of a row, S samples in it, N its loss tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trivet.algorithms.balance import Cost, arrange
from trivet.trainer.attention.packed import Segments
from trivet.wire.batches import MicroBatch

Place = tuple[int, int]
"""A row of the batch, and a sample in it, both counted from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTensors:
    """One row on the device. Only hidden states that predict a loss token reach the language-model head."""

    token_ids_1T: torch.Tensor
    position_ids_1T: torch.Tensor
    segments: Segments
    predictors_N: torch.Tensor
    """int64: position of the token before each loss token; its hidden state predicts the loss token."""
    targets_N: torch.Tensor
    temperatures_N: torch.Tensor
    sampler_logprobs_N: torch.Tensor
    advantages_N: torch.Tensor
    reference_logprobs_N: torch.Tensor | None = None
    """Log-probabilities of the reference policy, when the loss needs them."""
    teacher_logprobs_N: torch.Tensor | None = None
    """Log-probabilities of the teacher, when the batch has them."""
    samples_N: torch.Tensor
    """int64 [N]: each loss token's sample, numbered from 0 among the samples that have one."""
    num_samples: int
    """Samples with loss tokens."""
    places: tuple[Place, ...] = ()
    """Where those samples are in the batch; for messages."""
    is_dummy: bool = False
    """Stands in for a row that this rank does not have, so that its collectives match the others'. Counts for nothing."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the row, T."""
        return self.token_ids_1T.shape[1]


def rows_of_rank(
    rows: Sequence[MicroBatch],
    *,
    rank: int,
    num_ranks: int,
    device: torch.device,
    cost: Cost = sum,
    max_tokens: int | None = None,
) -> list[RowTensors]:
    """Return this rank's rows, with dummies up to the number that every rank has. Samples without loss tokens may be left out.

    Args:
        cost: the cost of a row, by which ranks are balanced; by default its tokens.
        max_tokens: pack the batch's samples again, into rows of at most this many tokens; None: keep the batch's rows.
    """
    samples: list[Place] = []
    packed: list[list[int]] = []
    for index, row in enumerate(rows):
        trained = _trained_samples(row)
        if trained.any():
            # A row that stays whole keeps all its samples, so that it need not be copied.
            kept = [number for number in range(len(trained)) if max_tokens is None or trained[number]]
            packed.append(list(range(len(samples), len(samples) + len(kept))))
            samples += [(index, number) for number in kept]
    lengths = [int(rows[index].sequence_lengths_S[number]) for index, number in samples]
    rows_by_rank = arrange(packed, lengths, num_ranks=num_ranks, cost=cost, max_tokens=max_tokens)
    own_rows = [_take(rows, [samples[each] for each in row], device=device) for row in rows_by_rank[rank]]
    return [row for row in own_rows if row.num_samples] + [_dummy(device)] * (
        max(map(len, rows_by_rank)) - sum(row.num_samples > 0 for row in own_rows)
    )


def _trained_samples(row: MicroBatch) -> np.ndarray:
    """Return a bool [S]: the samples that have loss tokens."""
    starts_S = np.cumsum(row.sequence_lengths_S) - row.sequence_lengths_S
    return np.add.reduceat(row.loss_mask_T, starts_S, dtype=np.int64) > 0 if len(starts_S) else np.zeros(0, dtype=np.bool_)


def _take(rows: Sequence[MicroBatch], places: Sequence[Place], *, device: torch.device) -> RowTensors:
    index = places[0][0]
    if len(places) == len(rows[index].sequence_lengths_S) and all(place == (index, n) for n, place in enumerate(places)):
        return to_tensors(rows[index], device=device, places=places)
    return to_tensors(join_samples(rows, places), device=device, places=places)


def join_samples(rows: Sequence[MicroBatch], places: Sequence[Place]) -> MicroBatch:
    """Make one row of these samples of `rows`, in this order."""
    ends = {index: np.cumsum(rows[index].sequence_lengths_S) for index, _ in places}
    spans = [
        (index, slice(ends[index][number] - rows[index].sequence_lengths_S[number], ends[index][number]))
        for index, number in places
    ]
    joined: dict[str, np.ndarray | None] = {}
    for name in (name for name in MicroBatch.__struct_fields__ if name.endswith("_T")):
        parts = [(getattr(rows[index], name), span) for index, span in spans]
        is_whole = all(values is not None for values, _ in parts)
        joined[name] = np.concatenate([values[span] for values, span in parts]) if is_whole else None
    lengths_S = np.array([rows[index].sequence_lengths_S[number] for index, number in places], dtype=np.int32)
    return MicroBatch(sequence_lengths_S=lengths_S, **joined)  # type: ignore[arg-type]  # only optional fields are None


def to_tensors(row: MicroBatch, *, device: torch.device, places: Sequence[Place] = ()) -> RowTensors:
    """Move one packed row to the device.

    Args:
        places: where in the batch the row's samples are.
    """
    lengths = [int(length) for length in row.sequence_lengths_S]
    loss_N = np.flatnonzero(row.loss_mask_T)
    starts_S = np.cumsum(row.sequence_lengths_S) - row.sequence_lengths_S
    assert not row.loss_mask_T[starts_S].any(), "the first token of a sample is predicted by nothing and cannot be trained on"
    present, samples_N = np.unique(np.searchsorted(starts_S, loss_N, side="right"), return_inverse=True)

    def ints(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(device)

    def floats(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values[loss_N].astype(np.float32)).to(device)

    return RowTensors(
        token_ids_1T=ints(row.token_ids_T)[None],
        position_ids_1T=ints(row.position_ids_T)[None],
        segments=Segments.of(lengths, device=device),
        predictors_N=ints(loss_N - 1),
        targets_N=ints(row.token_ids_T[loss_N]),
        temperatures_N=floats(row.temperatures_T),
        sampler_logprobs_N=floats(row.logprobs_T),
        advantages_N=floats(row.advantages_T),
        teacher_logprobs_N=None if row.teacher_logprobs_T is None else floats(row.teacher_logprobs_T),
        samples_N=ints(samples_N),
        num_samples=len(present),
        places=tuple(places[number - 1] for number in present) if places else (),
    )


def _dummy(device: torch.device) -> RowTensors:
    index = torch.zeros(1, dtype=torch.int64, device=device)
    number = torch.ones(1, device=device)
    return RowTensors(
        token_ids_1T=torch.zeros(1, 2, dtype=torch.int64, device=device),
        position_ids_1T=torch.arange(2, device=device)[None],
        segments=Segments.of([2], device=device),
        predictors_N=index,
        targets_N=index,
        temperatures_N=number,
        sampler_logprobs_N=number,
        advantages_N=number,
        samples_N=index,
        num_samples=1,
        is_dummy=True,
    )
