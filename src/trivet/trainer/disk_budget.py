"""Estimates what a run will write, and compares it with the free disk space. Called by `trainer.open_session`."""

import logging
from dataclasses import dataclass

import torch

from trivet.checkpoints.commit import removable_steps
from trivet.config.layout import RunLayout
from trivet.config.schema.shared import CkptConfig
from trivet.config.schema.trainer import TrainingConfig
from trivet.key_names import key_name
from trivet.storage.disk import format_bytes, free_bytes, require_free_space
from trivet.trainer.model.policy_model import PolicyModel, torch_dtype
from trivet.trainer.optim.optimizer import state_bytes
from trivet.wire.versions import Step

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes of one checkpoint and of one policy over all ranks, sidecar files aside."""

    checkpoint: int
    weights: int


def measure_sizes(model: PolicyModel, config: TrainingConfig) -> Sizes:
    """Compute the sizes. A checkpoint holds the trained parameters and the state of their optimizer."""
    parameters = model.trained_parameters
    parameter_bytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    served_dtype: torch.dtype = torch_dtype(config.model.compute_dtype)
    return Sizes(
        checkpoint=parameter_bytes + state_bytes(parameters, config.optim, matrices=model.hidden_matrices),
        weights=sum(parameter.numel() for parameter in parameters) * served_dtype.itemsize,
    )


def estimate(
    ckpt: CkptConfig, sizes: Sizes, *, from_step: int, max_steps: int | None, keep_recent: int
) -> tuple[int, int | None]:
    """Estimate what the steps after `from_step` will take, with `keep_recent` policies besides the newest.

    Returns:
        The bytes without which not even the first checkpoint can be committed, and those at the end of the run; None when it has
        no end.
    """
    # Besides `keep_recent`: the newest, the one being written, and the one that becomes unneeded only once that is published.
    num_policies = keep_recent + 3
    minimum = sizes.checkpoint + num_policies * sizes.weights
    if max_steps is None:
        return minimum, None
    steps = range(from_step + 1, max_steps + 1)
    committed = [Step(step) for step in steps if ckpt.is_due(step, max_steps=max_steps)]
    removed = set(removable_steps(committed, keep_last=ckpt.keep_last, keep_interval=ckpt.keep_interval))
    kept = [step for step in committed if step not in removed]
    num_being_written = int(len(removed) > 0)
    interval = ckpt.weights.interval
    steps_with_weights = {*kept, *(step for step in steps if interval and step % interval == 0)}
    weights_bytes = (len(steps_with_weights) + num_policies) * sizes.weights
    total = (len(kept) + num_being_written) * sizes.checkpoint + weights_bytes
    return min(minimum, total), total


def require_budget(config: TrainingConfig, layout: RunLayout, sizes: Sizes, *, from_step: int, keep_recent: int) -> None:
    """Refuse a disk that does not hold the first checkpoint and its weights; warn if it will not hold all."""
    minimum, total = estimate(config.ckpt, sizes, from_step=from_step, max_steps=config.max_steps, keep_recent=keep_recent)
    require_free_space(layout.root, minimum, what="the first checkpoint and its weights")
    free = free_bytes(layout.root)
    if total is not None and total > free:
        logger.warning(
            "the run will write %s of checkpoints (%s each) and weights (%s each), and %s are free in %s: it will stop when they "
            "are used up; set %s, or a larger %s",
            *map(format_bytes, (total, sizes.checkpoint, sizes.weights, free)),
            layout.root,
            key_name("ckpt.keep_last"),
            key_name("ckpt.interval"),
        )
