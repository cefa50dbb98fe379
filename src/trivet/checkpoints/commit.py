"""Commits a checkpoint, lists those there are to go back to, and removes old ones and what a run that goes back makes again.

Only the trainer commits. A checkpoint exists once COMMITTED does; whatever lacks it is ignored and removed on resume.
"""

import hashlib
import time
from collections.abc import Callable, Sequence

import msgspec

from trivet.checkpoints.parts import PARTS, TRAINER, is_part_done, read_listing, staging_directory
from trivet.config.layout import COMMITTED, RunLayout
from trivet.dependencies import own_version
from trivet.errors import CheckpointError, ResumeError
from trivet.faults import reach
from trivet.key_names import key_name
from trivet.step_directories import discard_after, discard_unfinished, list_steps
from trivet.storage.durable import (
    DECODE_ERRORS,
    digest_of,
    explain_difference,
    remove_directory,
    sweep_removed,
    sync_directory,
    write_json_atomically,
)
from trivet.wire.versions import Step

CHECKPOINT_SCHEMA = 3
"""Raised whenever a part changes in a way that an older reader would misread."""
_READABLE_SCHEMAS = (2, 3)
"""Schema 2 lists files by their SHA-256."""


class CommitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of COMMITTED."""

    step: Step
    time: float
    """Unix seconds."""
    parts: dict[str, str] = msgspec.field(name="halves")
    """Digest of each part's listing. On disk the field keeps its first name."""
    schema: int = 1
    """`CHECKPOINT_SCHEMA` of the writer."""
    version: str = ""
    """Version of this program that wrote it."""
    run_id: str = ""
    """Run that committed it; empty in checkpoints of versions that did not record it."""

    @property
    def digest(self) -> str:
        """SHA-256 of the record, which the history's `commit` repeats: it stands for every byte of the checkpoint."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()


def commit(
    layout: RunLayout,
    step: Step,
    *,
    parts: Sequence[str] = PARTS,
    run_id: str = "",
    clock: Callable[[], float] = lambda: time.time(),
) -> CommitRecord:
    """Make one checkpoint of both parts of `step`.

    Args:
        parts: supervised fine-tuning has the trainer's alone.

    Raises:
        CheckpointError: a part is not done, or the step is committed already.
    """
    staging, final = staging_directory(layout, step), layout.checkpoint_step(step)
    if (final / COMMITTED).exists():
        raise CheckpointError(f"{final} is committed already; resume from it, or remove it to write it again")
    missing = [name for name in parts if not is_part_done(layout, step, name)]
    if missing:
        raise CheckpointError(
            f"checkpoint {step} cannot be committed: {staging} lacks the part of the {' and the '.join(missing)}"
        )
    digests = {name: read_listing(staging / name).digest for name in parts}
    record = CommitRecord(
        step=step, time=clock(), parts=digests, schema=CHECKPOINT_SCHEMA, version=own_version(), run_id=run_id
    )
    reach("commit.before", step=step)
    write_json_atomically(staging / COMMITTED, record)
    reach("commit.during", step=step)
    remove_directory(final)
    staging.rename(final)
    sync_directory(layout.checkpoints)
    reach("commit.after", step=step)
    return record


def committed_steps(layout: RunLayout) -> list[Step]:
    """Return the steps that can be resumed from, oldest first."""
    return [Step(step) for step in list_steps(layout.checkpoints, marker=COMMITTED)]


def resolve_resume_step(layout: RunLayout, requested: int) -> Step:
    """Return the committed step that `requested` means; -1 is the newest.

    Raises:
        ResumeError: there is none, or none of that step; lists those there are.
    """
    steps = committed_steps(layout)
    if not steps:
        raise ResumeError(
            f"{key_name('ckpt.resume_step')} = {requested}, but {layout.checkpoints} holds no committed checkpoint; "
            f"leave {key_name('ckpt.resume_step')} out to start from the model, or give the output_dir of the run to resume"
        )
    if requested == -1:
        return steps[-1]
    if requested not in steps:
        known = ", ".join(str(step) for step in steps)
        raise ResumeError(
            f"{key_name('ckpt.resume_step')} = {requested} is not a committed checkpoint in {layout.checkpoints}; "
            f"there are {known}; take one of these, or -1 for the newest"
        )
    return Step(requested)


def discard_checkpoints_after(layout: RunLayout, step: Step) -> None:
    """Remove checkpoints of steps later than `step`, and what has their form but was never committed.

    Called when a run starts from `step`: those steps happen again.
    """
    discard_after(layout.checkpoints, step, marker=COMMITTED)
    sweep_removed(layout.checkpoints)


def discard_staging(layout: RunLayout) -> None:
    """Remove parts that were never committed.

    Call it only before a role writes a part. A part that stays only takes disk space: it is emptied before it is written again.
    """
    discard_unfinished(layout.checkpoints)


def read_record(layout: RunLayout, step: Step) -> CommitRecord:
    """Return the record in COMMITTED, without reading the files.

    Raises:
        CheckpointError: the step is not committed, its record cannot be read, is of another step or of other parts than lie
            there, or it has another schema.
    """
    path = layout.checkpoint_step(step) / COMMITTED
    try:
        record = msgspec.json.decode(path.read_bytes(), type=CommitRecord)
    except FileNotFoundError as exc:
        raise CheckpointError(f"{path.parent} has no {COMMITTED}: it was never committed") from exc
    except DECODE_ERRORS as exc:
        raise CheckpointError(f"{path} cannot be read: {exc}") from exc
    if record.schema not in _READABLE_SCHEMAS:
        readable = " and ".join(map(str, _READABLE_SCHEMAS))
        raise CheckpointError(
            f"{path.parent} has checkpoint schema {record.schema} (trivet {record.version or 'of an older version'}), this is "
            f"trivet {own_version()}, which reads schemas {readable}; resume with the version that wrote it, or "
            f"start a new run with model.name = {str(layout.weights_step(step))!r}"
        )
    if record.step != step:
        raise CheckpointError(
            f"{path} is the record of step {record.step}, not of step {step}: it was copied from another checkpoint; resume from "
            "another step"
        )
    present = {name for name in PARTS if (path.parent / name).exists()}
    if TRAINER not in record.parts or set(record.parts) != present:
        raise CheckpointError(
            f"{path} records the parts {sorted(record.parts)}, and {path.parent} holds {sorted(present)}: every part that was "
            "committed must be there, the trainer's at least; resume from another step"
        )
    return record


def verify_checkpoint(layout: RunLayout, step: Step) -> CommitRecord:
    """Read every file of a committed checkpoint and compare it with what was committed.

    Raises:
        CheckpointError: as `read_record`; or a file is missing, truncated or altered; names it.
    """
    record = read_record(layout, step)
    for name in record.parts:
        verify_part(layout, record, name)
    return record


def verify_part(layout: RunLayout, record: CommitRecord, name: str) -> None:
    """Read every file of one part and compare it with what was committed.

    Raises:
        CheckpointError: a file of the part is missing, truncated or altered; names it.
    """
    part = layout.checkpoint_step(record.step) / name
    listing = read_listing(part)
    if record.parts.get(name) != listing.digest or listing.digest != digest_of(listing.files):
        raise CheckpointError(f"{part} is not the part that was committed as step {record.step}: its listing was altered")
    if difference := explain_difference(part, listing.files):
        raise CheckpointError(f"checkpoint {record.step} cannot be resumed from: {difference}")


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
