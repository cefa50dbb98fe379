"""Makes the optimizer over sharded parameters; computes the learning rate of a step and clips by the norm over all ranks."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch

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
from trivet.trainer.device_copies import local_part
from trivet.trainer.optim.muon import GatheringMuon, JoinedOptimizers
from trivet.trainer.ranks.world import World, sum_over_ranks


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter], config: OptimizerConfig, *, matrices: Collection[torch.nn.Parameter] = ()
) -> torch.optim.Optimizer:
    """Make the optimizer that `config` names.

    Args:
        matrices: those of `parameters` that Muon optimizes.
    """
    if isinstance(config, SGDConfig):
        return torch.optim.SGD(
            parameters, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, weight_decay=config.weight_decay
        )
    if isinstance(config, AdamWConfig):
        return _adamw(parameters, config)
    chosen = {id(matrix) for matrix in matrices}
    rest = [parameter for parameter in parameters if id(parameter) not in chosen]
    parts: list[torch.optim.Optimizer] = []
    if matrices:
        parts.append(GatheringMuon(matrices, lr=config.lr, weight_decay=config.weight_decay, momentum=config.mu))
    if rest:
        parts.append(_adamw(rest, config))
    return JoinedOptimizers(parts)


def state_bytes(
    parameters: Iterable[torch.nn.Parameter], config: OptimizerConfig, *, matrices: Collection[torch.nn.Parameter] = ()
) -> int:
    """Return the bytes of the optimizer's state from its first update on, over all ranks, without single numbers."""
    chosen = {id(matrix) for matrix in matrices} if isinstance(config, MuonConfig) else set()

    def num_moments(parameter: torch.nn.Parameter) -> int:
        if isinstance(config, SGDConfig):
            return 1 if config.momentum else 0
        return 1 if id(parameter) in chosen else 2

    return sum(num_moments(parameter) * parameter.numel() * parameter.element_size() for parameter in parameters)


def _adamw(parameters: Iterable[torch.nn.Parameter], config: AdamWConfig | MuonConfig) -> torch.optim.AdamW:
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
    """The schedule as a function of the step; the only state to save is the step at which it began."""

    peak: float
    schedule: ScheduleConfig
    max_steps: int | None
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


def local_gradients(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Return this rank's shards of the gradients."""
    return [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]


def gradient_norm(gradients: list[torch.Tensor], world: World) -> torch.Tensor:
    """Compute the 2-norm over all parameters and ranks, as a float64 scalar on the device of the gradients. Collective.

    It works on shards directly, because a DTensor operation per parameter costs more.
    """
    norms = torch.stack([gradient.norm() for gradient in gradients])
    squares = sum_over_ranks(world, norms.double().square().sum())
    return (squares / world.num_replicas).sqrt()


def clip_gradients(gradients: list[torch.Tensor], *, norm: float, max_norm: float | None) -> None:
    """Scale the gradients in place so that their norm is at most `max_norm`."""
    if max_norm is not None and norm > max_norm:
        for gradient in gradients:
            gradient.mul_(max_norm / norm)
