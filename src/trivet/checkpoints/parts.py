"""The two parts of a checkpoint before it is committed: each role writes its own and marks it done.

The orchestrator writes its part of step N before it sends batch N, the trainer writes its own after step N. They lie side by
side in checkpoints/.step_N.tmp until `checkpoints.commit` makes one checkpoint of them.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from trivet.config.layout import RunLayout
from trivet.errors import CheckpointError
from trivet.storage.durable import (
    DECODE_ERRORS,
    FileRecord,
    digest_of,
    hash_files,
    list_files,
    remove_directory,
    sync_tree,
    write_json_atomically,
)
from trivet.wire.versions import Step

TRAINER, ORCHESTRATOR = "trainer", "orchestrator"
PARTS = (TRAINER, ORCHESTRATOR)
DONE = "DONE"
"""Listing and marker in one file, written last: a part that has it is whole."""


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """The files of one part."""

    files: dict[str, FileRecord]
    """Records by path relative to the part."""
    digest: str
    """SHA-256 over the sorted names, sizes and digests of the files."""


def staging_directory(layout: RunLayout, step: Step) -> Path:
    """Return the directory in which the parts of `step` wait for their commit."""
    return layout.checkpoints / f".{layout.checkpoint_step(step).name}.tmp"


def begin_part(layout: RunLayout, step: Step, name: str) -> Path:
    """Return an empty directory for the part `name` of step `step`; what an earlier attempt left there is gone."""
    _require_known(name)
    part = staging_directory(layout, step) / name
    remove_directory(part, marker=DONE)
    part.mkdir(parents=True)
    return part


def finish_part(layout: RunLayout, step: Step, name: str, *, known: Mapping[str, FileRecord] | None = None) -> Listing:
    """Make the part durable and mark it done.

    Args:
        known: records of files that were taken while these were written, by path relative to the part. They are not read again.

    Raises:
        CheckpointError: it was not begun, nothing was written, or a file is not there in the size of its record.
    """
    _require_known(name)
    part = staging_directory(layout, step) / name
    if not part.is_dir() or not (names := list_files(part)):
        raise CheckpointError(f"{part} holds no files: the {name}'s part of checkpoint {step} was not written")
    known = known or {}
    _require_sizes(part, known)
    sync_tree(part)
    files = {**known, **hash_files(part, [name for name in names if name not in known])}
    listing = Listing(files=files, digest=digest_of(files))
    write_json_atomically(part / DONE, listing)
    return listing


def is_part_done(layout: RunLayout, step: Step, name: str) -> bool:
    """Return whether the part is whole and waits for its commit."""
    _require_known(name)
    return (staging_directory(layout, step) / name / DONE).exists()


def read_listing(part: Path) -> Listing:
    """Return the listing of a part that is done.

    Raises:
        CheckpointError: the part has no marker, or it cannot be read.
    """
    try:
        return msgspec.json.decode((part / DONE).read_bytes(), type=Listing)
    except FileNotFoundError as exc:
        raise CheckpointError(f"{part} has no {DONE}: it was not written completely") from exc
    except DECODE_ERRORS as exc:
        raise CheckpointError(f"{part / DONE} cannot be read: {exc}") from exc


def _require_sizes(part: Path, known: Mapping[str, FileRecord]) -> None:
    """Require that files which other ranks wrote have arrived here in the sizes that those ranks report."""
    for name, record in known.items():
        path = part / name
        found = f"{path.stat().st_size} bytes" if path.is_file() else "no such file"
        if found != f"{record.num_bytes} bytes":
            raise CheckpointError(
                f"{path} was written with {record.num_bytes} bytes and has {found} here: output_dir must be one directory, which "
                "every rank of the trainer sees under the same path"
            )


def _require_known(name: str) -> None:
    assert name in PARTS, f"a checkpoint has the parts {PARTS}, not {name!r}"
