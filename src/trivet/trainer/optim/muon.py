"""Optimizes the matrices of a sharded model with torch's Muon and the rest with AdamW, as one optimizer.

Called by `trainer.optim.optimizer`. On sharded matrices torch.optim.Muon fails where a matrix has fewer rows than there are ranks.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from trivet.trainer.ranks.world import gather_tensor


class GatheringMuon(torch.optim.Optimizer):
    """Muon with Nesterov momentum for sharded matrices.

    Momentum stays sharded. Each rank gathers it matrix by matrix, has torch's Muon compute the update of the whole matrix, and
    applies its own rows of it.
    """

    def __init__(self, matrices: Iterable[torch.nn.Parameter], *, lr: float, weight_decay: float, momentum: float) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nothing here evaluates a loss again
        """Update all matrices that have a gradient. Collective."""
        assert closure is None, "an update does not compute its loss again"
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(matrix.grad)
                momentum = state["momentum_buffer"].lerp_(matrix.grad, 1 - group["momentum"])
                update = _compute_update(matrix.grad.lerp(momentum, group["momentum"]), lr=group["lr"])
                matrix.mul_(1 - group["lr"] * group["weight_decay"]).add_(update)


def _compute_update(direction: torch.Tensor, *, lr: float) -> torch.Tensor:
    """Return what torch's Muon adds to a matrix, sharded like `direction`. Collective. A GPU computes off-loaded shards too."""
    whole = gather_tensor(direction.to(direction.device_mesh.device_type) if isinstance(direction, DTensor) else direction)
    # Without momentum and weight decay, an update of zeros is the update itself.
    update = torch.nn.Parameter(torch.zeros_like(whole))
    update.grad = whole
    # The scale of arXiv 2502.16982, section 2.2: updates are as large as AdamW's, so that one learning rate serves both.
    torch.optim.Muon([update], lr=lr, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="match_rms_adamw").step()
    if not isinstance(direction, DTensor):
        return update.detach()
    rows = distribute_tensor(update.detach(), direction.device_mesh, direction.placements, src_data_rank=None)
    return rows.to(direction.to_local().device)


class JoinedOptimizers(torch.optim.Optimizer):
    """Several optimizers of different parameters, with one state and one list of groups: saved and loaded like one."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = list(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nothing here evaluates a loss again
        """Let each optimizer update its parameters."""
        assert closure is None, "an update does not compute its loss again"
        for part in self._parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the joint state and share it with each optimizer."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        place = 0
        for part in self._parts:
            end = place + len(part.param_groups)
            part.param_groups, part.state = self.param_groups[place:end], self.state
            place = end
