"""From the packed rows of a batch to what one rank computes on: who takes which row, and rows as tensors.

Legend: T tokens of a row, S samples in it, N its loss tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trivet.trainer.attention import Segments
from trivet.wire.batches import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTensors:
    """One row on the device. Only what predicts a loss token reaches the language-model head."""

    token_ids_1T: torch.Tensor
    position_ids_1T: torch.Tensor
    segments: Segments
    predictors_N: torch.Tensor
    """int64: position of the token before each loss token, whose hidden state predicts it."""
    targets_N: torch.Tensor
    temperatures_N: torch.Tensor
    sampler_logprobs_N: torch.Tensor
    advantages_N: torch.Tensor
    reference_logprobs_N: torch.Tensor | None = None
    """Of the reference policy, where the loss needs them."""
    teacher_logprobs_N: torch.Tensor | None = None
    """Of the teacher, when the batch carries them."""
    samples_N: torch.Tensor
    """int64 [N]: each loss token's sample, numbered from 0 among the samples that have one."""
    num_samples: int
    """Samples with loss tokens."""
    is_dummy: bool = False
    """Stands in for a row that this rank does not have, so that its collectives match the others'. Counts for nothing."""


def deal_rows(lengths: Sequence[int], *, num_ranks: int) -> list[list[int]]:
    """Deal rows to ranks, the longest first, each to the rank with the fewest tokens among those with a place left.

    Every rank has ceil(rows / ranks) places, because ranks compute row by row in lock step.

    Returns:
        Row indices of each rank.
    """
    places = -(-len(lengths) // num_ranks)
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = min((rank for rank in range(num_ranks) if len(dealt[rank]) < places), key=lambda r: (loads[r], r))
        dealt[rank].append(index)
        loads[rank] += lengths[index]
    return dealt


def rows_of_rank(rows: Sequence[MicroBatch], *, rank: int, num_ranks: int, device: torch.device) -> list[RowTensors]:
    """This rank's rows, filled up with dummies to as many as every other rank has; rows without loss tokens are left out."""
    kept = [row for row in rows if row.loss_mask_T.any()]
    dealt = deal_rows([row.num_tokens for row in kept], num_ranks=num_ranks)
    mine = [to_tensors(kept[index], device=device) for index in dealt[rank]]
    return mine + [_dummy(device)] * (max(map(len, dealt)) - len(mine))


def to_tensors(row: MicroBatch, *, device: torch.device) -> RowTensors:
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
