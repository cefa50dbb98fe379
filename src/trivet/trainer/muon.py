"""Muon for the matrices of a sharded model, AdamW for the rest, as one optimizer. Made by `trainer.optimizer`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim._muon import (  # no public name; torch.optim.Muon itself would orthogonalize each rank's rows on their own terms
    _adjust_lr,  # type: ignore[reportPrivateUsage]
    _zeropower_via_newtonschulz,  # type: ignore[reportPrivateUsage]
)


class WholeMatrixMuon(torch.optim.Muon):
    """torch's Muon, but that a sharded matrix is orthogonalized as a whole, not by rows.

    Momentum stays sharded. Every rank gathers each matrix of momentum in turn and computes the same update, of which it keeps
    its part.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nothing here evaluates a loss again
        assert closure is None, "an update does not compute its loss again"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.nn.Parameter, group: dict[str, Any]) -> None:
        gradient = parameter.grad
        assert gradient is not None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        direction = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        whole = direction.full_tensor() if isinstance(direction, DTensor) else direction
        update = _zeropower_via_newtonschulz(whole, group["ns_coefficients"], group["ns_steps"], group["eps"]).to(
            parameter.dtype
        )
        if isinstance(parameter, DTensor):
            # Every rank has all of it: nothing is sent.
            update = distribute_tensor(update, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-_adjust_lr(group["lr"], group["adjust_lr_fn"], parameter.shape))


class JoinedOptimizers(torch.optim.Optimizer):
    """Several optimizers, each of parameters of its own, with one state and one list of groups: saved and loaded like one."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = list(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nothing here evaluates a loss again
        assert closure is None, "an update does not compute its loss again"
        for part in self._parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        place = 0
        for part in self._parts:
            end = place + len(part.param_groups)
            part.param_groups, part.state = self.param_groups[place:end], self.state
            place = end
