"""Chooses which committed checkpoints are no longer needed, and removes them. Called by the trainer after each commit."""

from collections.abc import Sequence

from trivet.config.layout import COMMITTED, RunLayout
from trivet.storage.durable import remove_directory
from trivet.wire.versions import Step


def removable_steps(committed: Sequence[Step], *, keep_last: int | None, keep_interval: int | None) -> list[Step]:
    """Return the steps that are neither among the newest `keep_last` nor multiples of `keep_interval`, oldest first.

    With neither set all are kept. The newest is always kept: it is what a crash goes back to.
    """
    if keep_last is None and keep_interval is None:
        return []
    older = sorted(committed)[: -(keep_last or 1)]
    return [step for step in older if keep_interval is None or step % keep_interval != 0]


def remove_checkpoint(layout: RunLayout, step: Step) -> None:
    """Remove a committed checkpoint. Its commit marker is removed before any other file."""
    remove_directory(layout.checkpoint_step(step), marker=COMMITTED)
