"""The one commit of a checkpoint, which halves there are to go back to, and what a run that goes back removes.

Only the trainer commits. A checkpoint exists once COMMITTED does; whatever lacks it is ignored and removed on resume.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from trivet.checkpoints.halves import HALVES, is_half_done, read_listing, staging_directory
from trivet.config.layout import COMMITTED, RunLayout, parse_step
from trivet.config.shared import CkptConfig
from trivet.durable import digest_of, explain_difference, remove_directory, sweep_removed, sync_directory, write_json_atomically
from trivet.errors import CheckpointError, ResumeError
from trivet.wire.versions import Step


class Resumable(Protocol):
    """A role's configuration that may name a step to resume from."""

    @property
    def output_dir(self) -> Path: ...

    @property
    def ckpt(self) -> CkptConfig: ...


class CommitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of COMMITTED."""

    step: Step
    time: float
    """Unix seconds."""
    halves: dict[str, str]
    """Digest of each half's listing."""


def commit(
    layout: RunLayout, step: Step, *, halves: Sequence[str] = HALVES, clock: Callable[[], float] = time.time
) -> CommitRecord:
    """Make one checkpoint of both halves of `step`.

    Args:
        halves: supervised fine-tuning has the trainer's alone.

    Raises:
        CheckpointError: a half is not done, or the step is committed already.
    """
    staging, final = staging_directory(layout, step), layout.checkpoint_step(step)
    if (final / COMMITTED).exists():
        raise CheckpointError(f"{final} is committed already; resume from it, or remove it to write it again")
    missing = [name for name in halves if not is_half_done(layout, step, name)]
    if missing:
        raise CheckpointError(
            f"checkpoint {step} cannot be committed: {staging} lacks the half of the {' and the '.join(missing)}"
        )
    digests = {name: read_listing(staging / name).digest for name in halves}
    record = CommitRecord(step=step, time=clock(), halves=digests)
    remove_directory(final)
    sync_directory(staging)
    staging.rename(final)
    sync_directory(layout.checkpoints)
    write_json_atomically(final / COMMITTED, record)
    return record


def committed_steps(layout: RunLayout) -> list[Step]:
    """Steps that can be resumed from, oldest first."""
    if not layout.checkpoints.is_dir():
        return []
    steps = (parse_step(path.name) for path in layout.checkpoints.iterdir() if (path / COMMITTED).exists())
    return sorted(Step(step) for step in steps if step is not None)


def resolve_resume_step(layout: RunLayout, requested: int) -> Step:
    """The committed step that `requested` means; -1 is the newest.

    Raises:
        ResumeError: there is none, or none of that step; lists those there are.
    """
    steps = committed_steps(layout)
    if not steps:
        raise ResumeError(
            f"ckpt.resume_step = {requested}, but {layout.checkpoints} holds no committed checkpoint; "
            "leave ckpt.resume_step out to start from the model, or give the output_dir of the run to resume"
        )
    if requested == -1:
        return steps[-1]
    if requested not in steps:
        known = ", ".join(str(step) for step in steps)
        raise ResumeError(
            f"ckpt.resume_step = {requested} is not a committed checkpoint in {layout.checkpoints}; "
            f"there are {known}; take one of these, or -1 for the newest"
        )
    return Step(requested)


def require_resumable(config: Resumable) -> None:
    """What a command checks before it starts anything.

    Raises:
        ResumeError: the step to resume from is not there.
    """
    if config.ckpt.resume_step is not None:
        resolve_resume_step(RunLayout(config.output_dir), config.ckpt.resume_step)


def discard_later(layout: RunLayout, step: Step) -> None:
    """Remove checkpoints of steps later than `step`, and what has their form but was never committed.

    Called when a run starts from `step`: those steps happen again.
    """
    if not layout.checkpoints.is_dir():
        return
    for path in sorted(layout.checkpoints.iterdir()):
        found = parse_step(path.name)
        if found is not None and (found > step or not (path / COMMITTED).exists()):
            remove_directory(path, marker=COMMITTED)
    sweep_removed(layout.checkpoints)


def discard_staging(layout: RunLayout) -> None:
    """Remove halves that were never committed.

    Only before any role has started. A half that stays is harmless: each is emptied before it is written again.
    """
    if not layout.checkpoints.is_dir():
        return
    for path in sorted(layout.checkpoints.iterdir()):
        if path.name.startswith(".step_") and path.name.endswith(".tmp"):
            remove_directory(path)


def verify_checkpoint(layout: RunLayout, step: Step) -> CommitRecord:
    """Read every file of a committed checkpoint and compare it with what was committed.

    Raises:
        CheckpointError: the step is not committed, or a file is missing, truncated or altered; names it.
    """
    directory = layout.checkpoint_step(step)
    try:
        record = msgspec.json.decode((directory / COMMITTED).read_bytes(), type=CommitRecord)
    except FileNotFoundError as exc:
        raise CheckpointError(f"{directory} has no {COMMITTED}: it was never committed") from exc
    except msgspec.DecodeError as exc:
        raise CheckpointError(f"{directory / COMMITTED} cannot be read: {exc}") from exc
    for name, digest in record.halves.items():
        half = directory / name
        listing = read_listing(half)
        if digest != listing.digest or listing.digest != digest_of(listing.files):
            raise CheckpointError(f"{half} is not the half that was committed as step {step}: its listing was altered")
        if difference := explain_difference(half, listing.files):
            raise CheckpointError(f"checkpoint {step} cannot be resumed from: {difference}")
    return record
