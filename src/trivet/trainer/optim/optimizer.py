"""Makes the optimizer over sharded parameters; computes the learning rate of a step and clips by the norm over all ranks.

torch.optim.Muon fails on a sharded matrix that has fewer rows than there are ranks. So the trainer has a Muon of its own, which
gathers matrices, and joins it with AdamW for the other parameters.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from trivet.algorithms.schedules import cosine_factor, linear_factor
from trivet.config.schema.trainer import (
    AdamWConfig,
    ConstantSchedule,
    LinearSchedule,
    MuonConfig,
    OptimizerConfig,
    ScheduleConfig,
    SGDConfig,
)
from trivet.errors import ConfigError
from trivet.key_names import key_name
from trivet.trainer.ranks.world import World, gather_tensor, sum_over_ranks


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter], config: OptimizerConfig, *, matrices: Collection[torch.nn.Parameter] = ()
) -> torch.optim.Optimizer:
    """Make the optimizer that `config` names. Muon optimizes those of `parameters` that are `matrices`."""
    if isinstance(config, SGDConfig):
        return torch.optim.SGD(
            parameters, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, weight_decay=config.weight_decay
        )
    if isinstance(config, AdamWConfig):
        return _make_adamw(parameters, config)
    matrix_ids = {id(matrix) for matrix in matrices}
    rest = [parameter for parameter in parameters if id(parameter) not in matrix_ids]
    parts: list[torch.optim.Optimizer] = []
    if matrices:
        parts.append(GatheringMuon(matrices, lr=config.lr, weight_decay=config.weight_decay, momentum=config.mu))
    if rest:
        parts.append(_make_adamw(rest, config))
    return JoinedOptimizers(parts)


def state_bytes(
    parameters: Iterable[torch.nn.Parameter], config: OptimizerConfig, *, matrices: Collection[torch.nn.Parameter] = ()
) -> int:
    """Return the bytes of the optimizer's moments over all ranks, which exist from the first update on, without counts of steps."""
    muon_ids = {id(matrix) for matrix in matrices} if isinstance(config, MuonConfig) else set()

    def num_moments(parameter: torch.nn.Parameter) -> int:
        if isinstance(config, SGDConfig):
            return 1 if config.momentum else 0
        return 1 if id(parameter) in muon_ids else 2

    return sum(num_moments(parameter) * parameter.numel() * parameter.element_size() for parameter in parameters)


def _make_adamw(parameters: Iterable[torch.nn.Parameter], config: AdamWConfig | MuonConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=(config.betas1, config.betas2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """Computes the learning rate as a function of the step. The only state to save is the step at which the schedule began."""

    peak: float
    schedule: ScheduleConfig
    max_steps: int | None
    """The step at which the schedule ends; None for a constant rate."""
    start: int = 0
    """The step after which the schedule began."""

    def __post_init__(self) -> None:
        if self.max_steps is None and not isinstance(self.schedule, ConstantSchedule):
            raise ConfigError(
                f'scheduler.type = "{self.schedule.type}" ends at {key_name("max_steps")}, which is not set; set it, '
                'or scheduler.type = "constant"'
            )

    def at(self, step: int) -> float:
        """Return the rate of optimizer step `step`, counted from 1."""
        schedule = self.schedule
        if isinstance(schedule, ConstantSchedule) or self.max_steps is None:
            return self.peak
        step, max_steps = step - self.start, self.max_steps - self.start
        min_factor = min(schedule.min_lr / self.peak, 1.0) if self.peak else 0.0
        if isinstance(schedule, LinearSchedule):
            return self.peak * linear_factor(
                step,
                max_steps=max_steps,
                warmup_steps=schedule.warmup_steps,
                decay_steps=schedule.decay_steps,
                min_factor=min_factor,
            )
        return self.peak * cosine_factor(step, max_steps=max_steps, warmup_steps=schedule.warmup_steps, min_factor=min_factor)


def gradient_norm(gradients: list[torch.Tensor], world: World) -> torch.Tensor:
    """Compute the 2-norm over all parameters and ranks, as a float64 scalar on the device of the gradients. Collective.

    It works on shards directly, because a DTensor operation for each parameter costs more. The copies of a model have equal
    gradients, so the sum over ranks counts each gradient once for each copy.
    """
    norms = torch.stack([gradient.norm() for gradient in gradients])
    squares = sum_over_ranks(world, norms.double().square().sum())
    return (squares / world.num_replicas).sqrt()


def clip_gradients(gradients: list[torch.Tensor], *, norm: float, max_norm: float | None) -> None:
    """Scale the gradients in place so that their norm is at most `max_norm`."""
    if max_norm is not None and norm > max_norm:
        for gradient in gradients:
            gradient.mul_(max_norm / norm)


class GatheringMuon(torch.optim.Optimizer):
    """Muon with Nesterov momentum for sharded matrices.

    Momentum stays sharded. Each rank gathers one matrix at a time, computes its whole update with torch's Muon, and applies the
    rows of the update that belong to its shard.
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
    """Return the update that torch's Muon adds to a matrix, sharded like `direction`. Collective.

    The computation runs on the GPU, if there is one, for off-loaded shards too.
    """
    whole = gather_tensor(direction.to(direction.device_mesh.device_type) if isinstance(direction, DTensor) else direction)
    # Without momentum and weight decay, zeros after a step of Muon are the update itself.
    update = torch.nn.Parameter(torch.zeros_like(whole))
    update.grad = whole
    # The scale of arXiv 2502.16982, section 2.2: updates are as large as AdamW's, so that one learning rate serves both.
    torch.optim.Muon([update], lr=lr, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="match_rms_adamw").step()
    if not isinstance(direction, DTensor):
        return update.detach()
    rows = distribute_tensor(update.detach(), direction.device_mesh, direction.placements, src_data_rank=None)
    return rows.to(direction.to_local().device)


class JoinedOptimizers(torch.optim.Optimizer):
    """Joins optimizers of different parameters. They share one state and one list of groups, which is saved and loaded as one."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = list(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share_state()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nothing here evaluates a loss again
        """Let each optimizer update its parameters."""
        assert closure is None, "an update does not compute its loss again"
        for part in self._parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the joint state and share it with each optimizer."""
        super().load_state_dict(state_dict)
        self._share_state()

    def _share_state(self) -> None:
        """Give each optimizer its groups out of the joint list, and the joint state."""
        start = 0
        for part in self._parts:
            end = start + len(part.param_groups)
            part.param_groups, part.state = self.param_groups[start:end], self.state
            start = end
