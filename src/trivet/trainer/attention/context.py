"""Divides the tokens of a row over the ranks of a context group (`model.cp`), which compute the row together.

Called by `trainer.model.policy_model`. Each rank of the group computes the blocks for its own slice of the row. Before attention
the ranks exchange slices for heads: each gets the whole row of its part of the heads, to which the packed attention is applied as
it is; after it they exchange heads for slices. A rank scores the loss tokens whose predictors lie in its slice, and all ranks of
the group get all scores. So every loss sees the whole row, and its gradient reaches each score on one rank alone: gradients that
are summed over all ranks count each token once.

Source: DeepSpeed Ulysses, arXiv 2309.14509.

Legend: T tokens of a row, P ranks of the group, H heads, D features of a head, N loss tokens of the row.
"""

from dataclasses import dataclass, replace
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single  # the form with a gradient

from trivet.trainer.attention.packed import PackedAttention
from trivet.trainer.rows import RowTensors
from trivet.wire.experts import UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextGroup:
    """The ranks that compute a row together, and this rank's place among them."""

    group: dist.ProcessGroup
    size: int
    index: int
    """This rank's place in the group, from 0: it computes the slice of the row with this number."""

    def take_slice(self, row: RowTensors) -> tuple[RowTensors, torch.Tensor]:
        """Return `row` with this rank's tokens and the loss tokens that it scores, and which these are, int64, perhaps none.

        Segments stay those of the row. It gets a last segment without loss, so that it divides into slices of one length. The host
        waits for the device here.
        """
        token_ids, position_ids, segments = row.token_ids_1U, row.position_ids_1U, row.segments
        experts_ULK = row.experts_ULK
        if num_added := -row.num_tokens % self.size:
            added = torch.arange(num_added, device=token_ids.device)[None]
            token_ids = torch.cat([token_ids, torch.zeros_like(added)], dim=1)
            position_ids = torch.cat([position_ids, added], dim=1)
            segments = segments.with_segment(num_added)
            if experts_ULK is not None:
                unknown = torch.full_like(experts_ULK[:1], UNKNOWN).expand(num_added, -1, -1)
                experts_ULK = torch.cat([experts_ULK, unknown])
        num_tokens = token_ids.shape[1] // self.size
        own = torch.nonzero(row.predictors_N // num_tokens == self.index)[:, 0]
        part = replace(
            row,
            token_ids_1U=token_ids.chunk(self.size, dim=1)[self.index],
            position_ids_1U=position_ids.chunk(self.size, dim=1)[self.index],
            segments=segments,
            experts_ULK=None if experts_ULK is None else experts_ULK.chunk(self.size)[self.index],
            predictors_N=row.predictors_N[own] - self.index * num_tokens,
            targets_N=row.targets_N[own],
            temperatures_N=row.temperatures_N[own],
        )
        return part, own

    def share_scores(self, scores: torch.Tensor, own: torch.Tensor, row: RowTensors) -> torch.Tensor:
        """Return the scores of all loss tokens of `row`, [N], from those that each rank has. Collective over the group.

        The gradient of a score goes to the rank that computed it, and is not summed over the group.
        """
        shared = scores.new_zeros(len(row.predictors_N)).index_copy_(0, own, scores.detach())
        dist.all_reduce(shared, group=self.group)  # adds zeros of the other ranks, so the sum is exact
        return shared.index_copy(0, own, scores)

    def divide_attention(self, attend: PackedAttention) -> PackedAttention:
        """Return an attention over the tokens of a slice, made from `attend` over whole rows. Collective over the group.

        Shapes are those of `attention.packed`. Where there are fewer key heads than ranks, or their numbers do not divide, keys and
        values are repeated as far as needed. Torch must not trace the exchange into a graph, which would order it anew.
        """

        def attend_together(
            module: torch.nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None,
            *,
            s_aux: torch.Tensor | None = None,
            **options: Any,
        ) -> tuple[torch.Tensor, None]:
            num_repeats = lcm(key.shape[1], self.size) // key.shape[1]
            if num_repeats > 1:
                key, value = (tensor.repeat_interleave(num_repeats, dim=1) for tensor in (key, value))
            if s_aux is not None:
                options["s_aux"] = s_aux.chunk(self.size)[self.index]
            whole = (self._exchange(tensor, scattered=1, gathered=2) for tensor in (query, key, value))
            output, _ = attend(module, *whole, attention_mask, **options)
            return self._exchange(output, scattered=1, gathered=2), None

        untraced: Any = torch.compiler.disable(attend_together)
        return untraced

    def _exchange(self, tensor: torch.Tensor, *, scattered: int, gathered: int) -> torch.Tensor:
        """Return a tensor that has the parts of dimension `gathered` of all ranks, and this rank's part of dimension `scattered`.

        Before attention these are heads and tokens of [1, H, T, D], after it tokens and heads of [1, T, H, D].
        """
        parts = torch.stack(tensor.chunk(self.size, dim=scattered))
        return torch.cat(list(all_to_all_single(parts, None, None, self.group)), dim=gathered)
