"""The two halves of a checkpoint before it is committed: each role writes its own and marks it done.

The orchestrator writes its half of step N before it sends batch N, the trainer writes its own after step N. They lie side by
side in checkpoints/.step_N.tmp until `checkpoints.commit` makes one checkpoint of them.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from trivet.config.layout import RunLayout
from trivet.durable import (
    DECODE_ERRORS,
    FileRecord,
    digest_of,
    hash_files,
    list_files,
    remove_directory,
    sync_tree,
    write_json_atomically,
)
from trivet.errors import CheckpointError
from trivet.wire.versions import Step

TRAINER, ORCHESTRATOR = "trainer", "orchestrator"
HALVES = (TRAINER, ORCHESTRATOR)
DONE = "DONE"
"""Listing and marker in one file, written last: a half that has it is whole."""


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """The files of one half."""

    files: dict[str, FileRecord]
    """By path relative to the half."""
    digest: str
    """SHA-256 over the sorted names, sizes and digests of the files."""


def staging_directory(layout: RunLayout, step: Step) -> Path:
    return layout.checkpoints / f".{layout.checkpoint_step(step).name}.tmp"


def begin_half(layout: RunLayout, step: Step, name: str) -> Path:
    """An empty directory for the half `name` of step `step`; what an earlier attempt left there is gone."""
    _require_known(name)
    half = staging_directory(layout, step) / name
    remove_directory(half, marker=DONE)
    half.mkdir(parents=True)
    return half


def finish_half(layout: RunLayout, step: Step, name: str, *, known: Mapping[str, FileRecord] | None = None) -> Listing:
    """Make the half durable and mark it done.

    Args:
        known: records of files that were taken while these were written, by path relative to the half. They are not read again.

    Raises:
        CheckpointError: it was not begun, nothing was written, or a file is not there in the size of its record.
    """
    _require_known(name)
    half = staging_directory(layout, step) / name
    if not half.is_dir() or not (names := list_files(half)):
        raise CheckpointError(f"{half} holds no files: the {name}'s half of checkpoint {step} was not written")
    known = known or {}
    _require_sizes(half, known)
    sync_tree(half)
    files = {**known, **hash_files(half, [name for name in names if name not in known])}
    listing = Listing(files=files, digest=digest_of(files))
    write_json_atomically(half / DONE, listing)
    return listing


def is_half_done(layout: RunLayout, step: Step, name: str) -> bool:
    _require_known(name)
    return (staging_directory(layout, step) / name / DONE).exists()


def read_listing(half: Path) -> Listing:
    """
    Raises:
        CheckpointError: the half has no marker, or it cannot be read.
    """
    try:
        return msgspec.json.decode((half / DONE).read_bytes(), type=Listing)
    except FileNotFoundError as exc:
        raise CheckpointError(f"{half} has no {DONE}: it was not written completely") from exc
    except DECODE_ERRORS as exc:
        raise CheckpointError(f"{half / DONE} cannot be read: {exc}") from exc


def _require_sizes(half: Path, known: Mapping[str, FileRecord]) -> None:
    """Ranks on other machines say what they wrote; it must have arrived where this one looks."""
    for name, record in known.items():
        path = half / name
        found = f"{path.stat().st_size} bytes" if path.is_file() else "no such file"
        if found != f"{record.num_bytes} bytes":
            raise CheckpointError(
                f"{path} was written with {record.num_bytes} bytes and has {found} here: output_dir must be one directory, which "
                "every rank of the trainer sees under the same path"
            )


def _require_known(name: str) -> None:
    assert name in HALVES, f"a checkpoint has the halves {HALVES}, not {name!r}"
