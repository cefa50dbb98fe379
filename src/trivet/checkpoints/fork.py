"""Starts a new run from another run's checkpoint, which stays as it is. Called by commands that hold the output directory.

Files of a checkpoint are never written again, so the new run shares their bytes where the file system can.
"""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from trivet.checkpoints.commit import committed_steps, resolve_resume_step, verify_checkpoint
from trivet.config.layout import COMMITTED, STABLE, RunLayout
from trivet.errors import ResumeError
from trivet.key_names import key_name
from trivet.storage.durable import list_files, remove_directory, sync_directory, sync_tree
from trivet.wire.versions import Step


def choose_fork(layout: RunLayout, *, source: Path, resume_step: int | None) -> Step:
    """Return the step of the other run that ckpt.resume_from and ckpt.resume_step mean. Changes nothing.

    Raises:
        ResumeError: it is this run's own directory, or there is no such checkpoint.
        CheckpointError: the checkpoint is damaged or of another version.
    """
    if source.resolve() == layout.root.resolve():
        raise ResumeError(
            f"ckpt.resume_from = {str(source)!r} is the run's own output_dir; to go on with it set "
            f"{key_name('ckpt.resume_step')} alone, for a new run choose another output_dir"
        )
    other = RunLayout(source)
    step = resolve_resume_step(other, -1 if resume_step is None else resume_step)
    verify_checkpoint(other, step)
    return step


def adopt(source_dir: Path, step: Step, *, into: RunLayout, versions: Iterable[int] = ()) -> None:
    """Make checkpoint `step` of the run in `source_dir` the first of the run in `into`, which has none.

    Args:
        versions: published policies that come along, if they are still there; that of `step` itself is published anew.

    Raises:
        CheckpointError: what arrived is not what was committed.
    """
    assert not committed_steps(into), f"{into.root} has checkpoints of its own"
    source = RunLayout(source_dir)
    for version in versions:
        if (source.weights_step(version) / STABLE).exists():
            _share_directory(source.weights_step(version), into.weights_step(version), marker=STABLE)
    _share_directory(source.checkpoint_step(step), into.checkpoint_step(step), marker=COMMITTED)
    verify_checkpoint(into, step)


def _share_directory(source: Path, final: Path, *, marker: str) -> None:
    """Make `final` equal to `source`; its marker comes last, when all else is on disk."""
    staging = final.with_name(f".{final.name}.tmp")
    remove_directory(staging)
    for name in list_files(source):
        if name != marker:
            target = staging / name
            target.parent.mkdir(parents=True, exist_ok=True)
            _share(source / name, target)
    sync_tree(staging)
    remove_directory(final)
    staging.rename(final)
    sync_directory(final.parent)
    _share(source / marker, final / marker)
    sync_directory(final)


def _share(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
