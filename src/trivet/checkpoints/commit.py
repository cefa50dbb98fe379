"""Writes and reads checkpoints. A checkpoint has a part of each role, and a commit makes both parts valid together.

The orchestrator writes its part of step N before it sends batch N, the trainer writes its own after step N. Both parts are in
checkpoints/.step_N.tmp, each marked DONE, until the trainer commits them: it writes COMMITTED and renames the directory. A
checkpoint exists once COMMITTED does. A directory without COMMITTED is ignored, and removed on resume.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from trivet.config.layout import COMMITTED, RunLayout
from trivet.dependencies import own_version
from trivet.errors import CheckpointError, ResumeError
from trivet.faults import reach
from trivet.key_names import key_name
from trivet.step_directories import discard_after, discard_unfinished, list_steps
from trivet.storage.durable import (
    DECODE_ERRORS,
    FileRecord,
    digest_of,
    explain_difference,
    hash_files,
    list_files,
    remove_directory,
    sweep_removed,
    sync_directory,
    sync_tree,
    write_json_atomically,
)
from trivet.wire.versions import Step

TRAINER, ORCHESTRATOR = "trainer", "orchestrator"
PARTS = (TRAINER, ORCHESTRATOR)
DONE = "DONE"
"""Name of the file that lists a part's files. It is written last, so a part that has it is whole."""
CHECKPOINT_SCHEMA = 4
"""Raised whenever a part changes in a way that an older reader would misread. Other schemas are refused."""


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """The content of DONE: the files of one part."""

    files: dict[str, FileRecord]
    """Records by path relative to the part."""
    digest: str
    """SHA-256 over the sorted names, sizes and digests of the files."""


class CommitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of COMMITTED."""

    step: Step
    time: float
    """Unix seconds."""
    parts: dict[str, str]
    """Digest of each part's listing."""
    schema: int
    """`CHECKPOINT_SCHEMA` of the writer."""
    version: str
    """Version of trivet that wrote the record."""
    run_id: str
    """Id of the run that committed."""

    @property
    def digest(self) -> str:
        """SHA-256 of the record. The event `commit` has it too. It covers every byte of the checkpoint, by the parts' digests."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()


def staging_directory(layout: RunLayout, step: Step) -> Path:
    """Return the directory that holds the parts of `step` before their commit."""
    return layout.checkpoints / f".{layout.checkpoint_step(step).name}.tmp"


def begin_part(layout: RunLayout, step: Step, name: str) -> Path:
    """Return an empty directory for the part `name` of `step`, after removing what an earlier attempt left there."""
    assert name in PARTS, f"a checkpoint has the parts {PARTS}, not {name!r}"
    part = staging_directory(layout, step) / name
    remove_directory(part, marker=DONE)
    part.mkdir(parents=True)
    return part


def finish_part(layout: RunLayout, step: Step, name: str, *, written: Mapping[str, FileRecord] | None = None) -> Listing:
    """Make the part durable and mark it done.

    Args:
        written: records of files, by path relative to the part, that were made while the files were written. Only the other files
            are read and hashed.
    """
    part = staging_directory(layout, step) / name
    if not part.is_dir() or not (names := list_files(part)):
        raise CheckpointError(f"{part} holds no files: the {name}'s part of checkpoint {step} was not written")
    written = written or {}
    for file_name, record in written.items():  # other ranks may have written them, on another node
        path = part / file_name
        found = f"{path.stat().st_size} bytes" if path.is_file() else "no such file"
        if found != f"{record.num_bytes} bytes":
            raise CheckpointError(
                f"{path} was written with {record.num_bytes} bytes and has {found} here: output_dir must be one directory, which "
                "every rank of the trainer sees under the same path"
            )
    sync_tree(part)
    files = {**written, **hash_files(part, [name for name in names if name not in written])}
    listing = Listing(files=files, digest=digest_of(files))
    write_json_atomically(part / DONE, listing)
    return listing


def read_listing(part: Path) -> Listing:
    """Return the listing of a part that is done."""
    try:
        return msgspec.json.decode((part / DONE).read_bytes(), type=Listing)
    except FileNotFoundError as exc:
        raise CheckpointError(f"{part} has no {DONE}: it was not written completely") from exc
    except DECODE_ERRORS as exc:
        raise CheckpointError(f"{part / DONE} cannot be read: {exc}") from exc


def commit(
    layout: RunLayout,
    step: Step,
    *,
    parts: Sequence[str] = PARTS,
    run_id: str = "",
    clock: Callable[[], float] = lambda: time.time(),
) -> CommitRecord:
    """Make one checkpoint of the parts of `step`. A run without an orchestrator, such as supervised fine-tuning, has one part."""
    staging, final = staging_directory(layout, step), layout.checkpoint_step(step)
    if (final / COMMITTED).exists():
        raise CheckpointError(f"{final} is committed already; resume from it, or remove it to write it again")
    if missing := [name for name in parts if not (staging / name / DONE).exists()]:
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
    """Return the committed step that ckpt.resume_step = `requested` means; -1 is the newest."""
    steps = committed_steps(layout)
    if not steps:
        raise ResumeError(
            f"{key_name('ckpt.resume_step')} = {requested}, but {layout.checkpoints} holds no committed checkpoint; "
            f"leave {key_name('ckpt.resume_step')} out to start from the model, or give the output_dir of the run to resume"
        )
    if requested == -1:
        return steps[-1]
    if requested not in steps:
        raise ResumeError(
            f"{key_name('ckpt.resume_step')} = {requested} is not a committed checkpoint in {layout.checkpoints}; "
            f"there are {', '.join(map(str, steps))}; take one of these, or -1 for the newest"
        )
    return Step(requested)


def discard_checkpoints_after(layout: RunLayout, step: Step) -> None:
    """Remove checkpoints of steps later than `step`, which the run takes again, and uncommitted directories of the same form."""
    discard_after(layout.checkpoints, step, marker=COMMITTED)
    sweep_removed(layout.checkpoints)


def discard_staging(layout: RunLayout) -> None:
    """Remove parts that were never committed.

    Call it only before a role writes a part. If it is not called, such parts only take disk space, because `begin_part` empties a
    part before it is written again.
    """
    discard_unfinished(layout.checkpoints)


def read_record(layout: RunLayout, step: Step) -> CommitRecord:
    """Return the record in COMMITTED, without reading the files of the parts."""
    path = layout.checkpoint_step(step) / COMMITTED
    try:
        record = msgspec.json.decode(path.read_bytes(), type=CommitRecord)
    except FileNotFoundError as exc:
        raise CheckpointError(f"{path.parent} has no {COMMITTED}: it was never committed") from exc
    except DECODE_ERRORS as exc:
        raise CheckpointError(f"{path} cannot be read ({exc}): it is damaged, or another version of trivet wrote it") from exc
    if record.schema != CHECKPOINT_SCHEMA:
        raise CheckpointError(
            f"{path.parent} has checkpoint schema {record.schema} (trivet {record.version}), this is trivet {own_version()}, which "
            f"reads schema {CHECKPOINT_SCHEMA}; resume with the version that wrote it, or start a new run with "
            f"model.name = {str(layout.weights_step(step))!r}"
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


def verify_checkpoint(layout: RunLayout, step: Step, *, only: str | None = None) -> CommitRecord:
    """Compare every file of a committed checkpoint, or of its part `only`, with the digest that was committed."""
    record = read_record(layout, step)
    for name, digest in record.parts.items():
        if only not in (None, name):
            continue
        part = layout.checkpoint_step(step) / name
        listing = read_listing(part)
        if digest != listing.digest or digest != digest_of(listing.files):
            raise CheckpointError(f"{part} is not the part that was committed as step {step}: its listing was altered")
        if difference := explain_difference(part, listing.files):
            raise CheckpointError(f"checkpoint {step} cannot be resumed from: {difference}")
    return record


def removable_steps(committed: Sequence[Step], *, keep_last: int | None, keep_interval: int | None) -> list[Step]:
    """Return the steps that are neither among the newest `keep_last` nor multiples of `keep_interval`, oldest first.

    With neither set all are kept. The newest is always kept, because a run resumes from it after a crash.
    """
    if keep_last is None and keep_interval is None:
        return []
    older = sorted(committed)[: -(keep_last or 1)]
    return [step for step in older if keep_interval is None or step % keep_interval != 0]
