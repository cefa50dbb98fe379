"""Turns the packed rows of a batch into the rows that one rank computes. Called by `trainer.step`.

Legend: T tokens of a row, U of them that are computed (a token that samples share counts once), S samples in it, N its loss tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trivet.algorithms.packing import arrange
from trivet.trainer.attention.packed import Segments
from trivet.trainer.device_copies import to_device
from trivet.trainer.prefixes import build_tree, flat_tree, group_by_prefix
from trivet.wire.batches import MicroBatch
from trivet.wire.experts import UNKNOWN

SampleIndex = tuple[int, int]
"""The index of a row in the batch, and the index of a sample in that row."""
_LANE_GAIN = 1.11
"""Speed of lanes on short rows, divided by that of all cores together on one long row. Measured with SmolLM2 in float32 on two
cores with AVX2."""
Cost = Callable[[Sequence[int], Sequence[int]], float]
"""Returns the cost of segments from their lengths and the lengths of their prefixes, in tokens. The cost of a row is the sum over
its segments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTensors:
    """One row on the device. Only hidden states that predict a loss token reach the language-model head."""

    token_ids_1U: torch.Tensor
    position_ids_1U: torch.Tensor
    segments: Segments
    predictors_N: torch.Tensor
    """int64: position of the token before each loss token; its hidden state predicts the loss token. Samples that continue one
    prefix differently have the same position here."""
    targets_N: torch.Tensor
    temperatures_N: torch.Tensor
    sampler_logprobs_N: torch.Tensor
    advantages_N: torch.Tensor
    reference_logprobs_N: torch.Tensor | None = None
    """Log-probabilities of the reference policy, when the loss needs them."""
    teacher_logprobs_N: torch.Tensor | None = None
    """Log-probabilities of the teacher, when the batch has them."""
    proximal_logprobs_N: torch.Tensor | None = None
    """Log-probabilities of the policy that the batch's first update started from; None at that update."""
    chosen_N: torch.Tensor | None = None
    """bool: the tokens that the loss treats differently (`trainer.losses.choice`), when it needs such a choice."""
    samples_N: torch.Tensor
    """int64 [N]: the sample of each loss token, numbered from 0 among the samples with loss tokens."""
    num_samples: int
    """Samples with loss tokens."""
    num_loss_tokens_S: tuple[int, ...]
    """Number of loss tokens of each of these samples. In main memory, because the host would wait for a count on the device."""
    uses_temperatures: bool = True
    """False when every temperature is 1."""
    experts_ULK: torch.Tensor | None = None
    """int64: the experts that the server chose for each token and layer, `wire.experts.UNKNOWN` where they are not known; None when
    the model's own routers choose."""
    sample_indices: tuple[SampleIndex, ...] = ()
    """The indices of these samples in the batch, for messages."""
    is_dummy: bool = False
    """True for a row without effect on loss and metrics. A rank with fewer rows than others computes dummies, because all ranks
    must take part in the same collectives."""

    @property
    def num_tokens(self) -> int:
        """Tokens to compute, U."""
        return self.token_ids_1U.shape[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """The rows of every rank. Each rank makes the same plan of the same batch."""

    batch: Sequence[MicroBatch]
    rows_by_rank: Sequence[Sequence[Sequence[SampleIndex]]]
    """Rows of each rank, and samples of each row."""
    shares_prefixes: bool
    max_tokens: int
    """Most tokens of a row. Only a single sample, or samples that share a prefix, may exceed it."""
    num_tokens: int
    """Tokens to compute, on all ranks together. A token that samples of a row share counts once."""
    cost: float
    """The sum of the costs of all rows."""

    def take(self, rank: int, *, device: torch.device) -> list[RowTensors]:
        """Return the rows of `rank`, with dummies up to the number that every rank has."""
        rows: list[RowTensors] = []
        for samples in self.rows_by_rank[rank]:
            first_row = samples[0][0]
            is_whole = list(samples) == [(first_row, number) for number in range(len(self.batch[first_row].sequence_lengths_S))]
            row = self.batch[first_row] if is_whole else join_samples(self.batch, samples)
            rows.append(to_tensors(row, device=device, sample_indices=samples, shares_prefixes=self.shares_prefixes))
        rows = [row for row in rows if row.num_samples]
        return rows + [_dummy(device)] * (max(map(len, self.rows_by_rank)) - len(rows))


def plan_rows(
    rows: Sequence[MicroBatch],
    *,
    num_ranks: int,
    cost: Cost | None = None,
    max_tokens: int | None = None,
    max_shared_tokens: int | None = None,
    shares_prefixes: bool = True,
    packs: bool = True,
) -> RowPlan:
    """Decide which samples of a batch share a row, and which rank computes it. Samples without loss tokens may be left out.

    Samples that share a prefix stay together. If there are any, all samples are packed again, into rows of no more tokens than the
    batch's longest row has. A row whose samples share a prefix exceeds `max_tokens` if that saves more than short rows do.

    Args:
        cost: the cost of a row, by which ranks are balanced; by default its tokens.
        max_tokens: pack the batch's samples again, into rows of at most this many tokens; None: keep the batch's rows.
        max_shared_tokens: most tokens of a row whose samples share a prefix; None: the limit of any other row.
        shares_prefixes: compute a prefix that samples of a row share only once.
        packs: false: each sample is a row of its own, and the arguments about sharing and limits have no effect.
    """
    shares_prefixes = shares_prefixes and packs
    samples: list[SampleIndex] = []
    tokens_by_sample: list[np.ndarray] = []
    packed: list[list[int]] = []
    for index, row in enumerate(rows):
        if row.loss_mask_T.any():
            masks, parts = row.split(row.loss_mask_T), row.split(row.token_ids_T)
            # A row that stays whole keeps all its samples, so that it need not be copied.
            kept = [number for number, mask_T in enumerate(masks) if mask_T.any() or (packs and max_tokens is None)]
            packed.append(list(range(len(samples), len(samples) + len(kept))))
            samples += [(index, number) for number in kept]
            tokens_by_sample += [parts[number] for number in kept]
    # An item has the numbers of samples that stay together in one row. `packed` has the items of each row of the batch.
    items = [[number] for number in range(len(samples))]
    if not packs:
        packed, max_tokens = items, None
    row_limit = max_tokens or max((row.num_tokens for row in rows), default=0)
    if shares_prefixes:
        # A group that is larger than a rank's part of the batch would leave other ranks without work.
        tokens_per_rank = -(-sum(map(len, tokens_by_sample)) // num_ranks)
        groups = _choose_groups(
            tokens_by_sample,
            max_tokens=min(row_limit, tokens_per_rank),
            max_shared_tokens=min(max_shared_tokens or row_limit, tokens_per_rank),
        )
        if len(groups) < len(items):
            items, max_tokens = groups, row_limit
    trees = [build_tree([tokens_by_sample[number] for number in item]) for item in items]
    lengths = [tree.num_tokens for tree in trees]
    costs = [cost(tree.lengths, tree.prefix_lengths) for tree in trees] if cost else list(map(float, lengths))
    items_by_rank = arrange(packed, lengths, costs=costs, num_ranks=num_ranks, max_tokens=max_tokens)
    return RowPlan(
        batch=rows,
        rows_by_rank=[
            [[samples[number] for item in row for number in items[item]] for row in own_rows] for own_rows in items_by_rank
        ],
        shares_prefixes=shares_prefixes,
        max_tokens=row_limit,
        num_tokens=sum(lengths),
        cost=sum(costs),
    )


def _choose_groups(samples: Sequence[np.ndarray], *, max_tokens: int, max_shared_tokens: int) -> list[list[int]]:
    """Group samples that share a prefix. A group exceeds `max_tokens` only where dividing it would cost more than lanes gain.

    Args:
        samples: token ids of each sample. The result has indices of samples.
    """

    def num_tokens(group: Sequence[int]) -> int:
        return build_tree([samples[number] for number in group]).num_tokens

    groups: list[list[int]] = []
    for group in group_by_prefix(samples, max_tokens=max_shared_tokens):
        num_undivided = num_tokens(group)
        if num_undivided <= max_tokens:
            groups.append(group)
            continue
        divided = group_by_prefix([samples[number] for number in group], max_tokens=max_tokens)
        parts = [[group[position] for position in part] for part in divided]
        groups += [group] if sum(map(num_tokens, parts)) > _LANE_GAIN * num_undivided else parts
    return groups


def join_samples(rows: Sequence[MicroBatch], samples: Sequence[SampleIndex]) -> MicroBatch:
    """Make one row of these samples of `rows`, in this order."""
    row_indices = {index for index, _ in samples}
    joined: dict[str, np.ndarray | None] = {}
    for name in (name for name in MicroBatch.__struct_fields__ if name.endswith("_T")):
        columns = {index: getattr(rows[index], name) for index in row_indices}
        if any(values_T is None for values_T in columns.values()):
            joined[name] = None
            continue
        parts = {index: rows[index].split(values_T) for index, values_T in columns.items()}
        joined[name] = np.concatenate([parts[index][number] for index, number in samples])
    lengths_S = np.array([rows[index].sequence_lengths_S[number] for index, number in samples], dtype=np.int32)
    experts_S = [rows[index].experts_S[number] if rows[index].experts_S else None for index, number in samples]
    # The ignored error: only optional fields are None.
    return MicroBatch(sequence_lengths_S=lengths_S, experts_S=experts_S, **joined)  # type: ignore[arg-type]


def to_tensors(
    row: MicroBatch, *, device: torch.device, sample_indices: Sequence[SampleIndex] = (), shares_prefixes: bool = True
) -> RowTensors:
    """Move one packed row to the device.

    Args:
        sample_indices: the indices of its samples in the batch, for messages; may be left out.
        shares_prefixes: see `plan_rows`.
    """
    samples = row.split(row.token_ids_T)
    tree = build_tree(samples) if shares_prefixes else flat_tree(samples)
    loss_N = np.flatnonzero(row.loss_mask_T)
    starts_S = np.cumsum(row.sequence_lengths_S) - row.sequence_lengths_S
    assert not row.loss_mask_T[starts_S].any(), "the first token of a sample is predicted by nothing and cannot be trained on"
    # `present` has the numbers, from 1, of the samples with loss tokens.
    present, samples_N = np.unique(np.searchsorted(starts_S, loss_N, side="right"), return_inverse=True)

    def ints(values: np.ndarray) -> torch.Tensor:
        return to_device(values.astype(np.int64), device)

    def floats(values: np.ndarray) -> torch.Tensor:
        return to_device(values[loss_N].astype(np.float32), device)

    return RowTensors(
        token_ids_1U=ints(row.token_ids_T[tree.sources_U])[None],
        position_ids_1U=ints(row.position_ids_T[tree.sources_U])[None],
        segments=Segments.from_tree(tree, device=device),
        predictors_N=ints(tree.computed_indices_T[loss_N - 1]),
        targets_N=ints(row.token_ids_T[loss_N]),
        temperatures_N=floats(row.temperatures_T),
        sampler_logprobs_N=floats(row.logprobs_T),
        advantages_N=floats(row.advantages_T),
        teacher_logprobs_N=None if row.teacher_logprobs_T is None else floats(row.teacher_logprobs_T),
        samples_N=ints(samples_N),
        num_samples=len(present),
        num_loss_tokens_S=tuple(np.bincount(samples_N, minlength=len(present)).tolist()),
        uses_temperatures=bool((row.temperatures_T[loss_N] != 1).any()),
        experts_ULK=None if (experts_TLK := decompress_experts(row)) is None else ints(experts_TLK[tree.sources_U]),
        sample_indices=tuple(sample_indices[number - 1] for number in present) if sample_indices else (),
    )


def decompress_experts(row: MicroBatch) -> np.ndarray | None:
    """Return int16 [T, layers, experts of a token], `UNKNOWN` for samples without; None when all are without."""
    known = next((experts for experts in row.experts_S if experts is not None), None)
    if known is None:
        return None
    parts = [
        np.full((length, *known.shape[1:]), UNKNOWN, dtype=np.int16) if experts is None else experts.decompress(length)
        for length, experts in zip(row.sequence_lengths_S.tolist(), row.experts_S, strict=True)
    ]
    return np.concatenate(parts)


def _dummy(device: torch.device) -> RowTensors:
    index = torch.zeros(1, dtype=torch.int64, device=device)
    number = torch.ones(1, device=device)
    return RowTensors(
        token_ids_1U=torch.zeros(1, 2, dtype=torch.int64, device=device),
        position_ids_1U=torch.arange(2, device=device)[None],
        segments=Segments.from_samples([2], device=device),
        predictors_N=index,
        targets_N=index,
        temperatures_N=number,
        sampler_logprobs_N=number,
        advantages_N=number,
        samples_N=index,
        num_samples=1,
        num_loss_tokens_S=(1,),
        is_dummy=True,
    )
