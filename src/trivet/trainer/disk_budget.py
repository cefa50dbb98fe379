"""Estimates what a run will write and compares it with the free disk space. Called by `trainer.open_session`."""

import logging

import torch

from trivet.checkpoints.budget import Sizes, estimate
from trivet.config.layout import RunLayout
from trivet.config.sections.trainer import TrainingConfig
from trivet.storage.disk import format_bytes, free_bytes, require_room
from trivet.trainer.model.policy_model import PolicyModel, torch_dtype
from trivet.trainer.optim.optimizer import state_bytes

logger = logging.getLogger(__name__)


def measure_sizes(model: PolicyModel, config: TrainingConfig) -> Sizes:
    """Return the bytes of one checkpoint and of one policy, over all ranks.

    A checkpoint holds the trained parameters and the state of their optimizer.
    """
    parameters = model.trained_parameters
    held = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    served_dtype: torch.dtype = torch_dtype(config.model.compute_dtype)
    return Sizes(
        checkpoint=held + state_bytes(parameters, config.optim, matrices=model.hidden_matrices),
        weights=sum(parameter.numel() for parameter in parameters) * served_dtype.itemsize,
    )


def require_budget(config: TrainingConfig, layout: RunLayout, sizes: Sizes, *, from_step: int, keep_recent: int) -> None:
    """Warn if the disk will not hold all that the run is to write.

    Raises:
        DiskFull: it does not even hold the first checkpoint and the weights beside it.
    """
    needed = estimate(config.ckpt, sizes, from_step=from_step, max_steps=config.max_steps, keep_recent=keep_recent)
    require_room(layout.root, needed.minimum, what="the first checkpoint and the weights beside it")
    free = free_bytes(layout.root)
    if needed.total is None or needed.total <= free:
        return
    logger.warning(
        "the run will write %s of checkpoints (%s each) and weights (%s each), and %s are free in %s: it will stop when they "
        "are used up; set ckpt.keep_last, or a larger ckpt.interval",
        format_bytes(needed.total),
        format_bytes(sizes.checkpoint),
        format_bytes(sizes.weights),
        format_bytes(free),
        layout.root,
    )
