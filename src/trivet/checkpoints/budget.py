"""Estimates how much disk a run will take, before its first step. Pure; the trainer calls it once its model is loaded."""

from dataclasses import dataclass

from trivet.config.sections.shared import CkptConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes of one checkpoint and of one policy, sidecar files aside."""

    checkpoint: int
    weights: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskEstimate:
    """Bytes that a run will take."""

    minimum: int
    """Bytes without which not even the first checkpoint can be committed."""
    total: int | None
    """Bytes at the end of the run; None when it has no end."""


def estimate(ckpt: CkptConfig, sizes: Sizes, *, from_step: int, max_steps: int | None, keep_recent: int) -> DiskEstimate:
    """Estimate from the sizes of one checkpoint and one policy.

    Args:
        from_step: the last step done.
        keep_recent: policies that stay besides the newest, for servers that lag.
    """
    # One more while the next is being written, which makes one superfluous only when it is there.
    policies = keep_recent + 3
    minimum = sizes.checkpoint + policies * sizes.weights
    if max_steps is None:
        return DiskEstimate(minimum=minimum, total=None)
    steps = range(from_step + 1, max_steps + 1)
    committed = [step for step in steps if ckpt.is_due(step, max_steps=max_steps)]
    if ckpt.keep_last is None and ckpt.keep_interval is None:
        kept = committed
    else:
        newest = committed[-(ckpt.keep_last or 1) :]
        kept = [step for step in committed if step in newest or (ckpt.keep_interval and step % ckpt.keep_interval == 0)]
    num_being_written = int(len(kept) < len(committed))
    interval = ckpt.weights.interval
    with_weights = {*kept, *(step for step in steps if interval and step % interval == 0)}
    total = (len(kept) + num_being_written) * sizes.checkpoint + (len(with_weights) + policies) * sizes.weights
    return DiskEstimate(minimum=min(minimum, total), total=total)
