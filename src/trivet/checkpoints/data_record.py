"""Keeps what data a checkpoint was made with, by a digest of each data set, and compares it when a run is resumed.

Both parts have a record: the orchestrator's of its environments, the trainer's of supervised fine-tuning of its conversations.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec

from trivet.errors import CheckpointError, ResumeError
from trivet.key_names import key_name
from trivet.wire.versions import Step

logger = logging.getLogger(__name__)

DATA_FILE = "data.json"


class DataRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One data set."""

    num_records: int
    digest: str
    """Digest of its contents in their order; empty: unknown."""


def write_data_record(part: Path, records: Mapping[str, DataRecord]) -> None:
    """Write the record into a part that was begun and is not finished.

    Args:
        records: by what the user calls each data set.
    """
    (part / DATA_FILE).write_bytes(msgspec.json.encode(records))


def compare_data(part: Path, records: Mapping[str, DataRecord], *, step: Step, strict_key: str | None) -> None:
    """Log each data set that is not the one of the checkpoint. One that is new, or gone, is a matter of the settings.

    Args:
        part: committed.
        strict_key: the key because of which the run refuses other data; None: it goes on.

    Raises:
        ResumeError: data differ, and `strict_key` refuses that.
        CheckpointError: the record cannot be read.
    """
    path = part / DATA_FILE
    if not path.exists():  # a part that an earlier version wrote
        return
    try:
        saved = msgspec.json.decode(path.read_bytes(), type=dict[str, DataRecord])
    except (OSError, msgspec.MsgspecError) as exc:
        raise CheckpointError(f"{path} cannot be read: {exc}") from exc
    for name, record in records.items():
        before = saved.get(name, record)
        if before == record or not before.digest or not record.digest:
            continue
        counts = (
            f"{record.num_records} instead of {before.num_records}"
            if record.num_records != before.num_records
            else (f"{record.num_records} as before, with other contents")
        )
        message = (
            f"{name}: the data are not those of checkpoint step_{step} ({counts}). Data that are drawn at every start need a seed, "
            "for example in the arguments of the environment"
        )
        if strict_key is not None:
            raise ResumeError(
                f"{message}; {key_name(strict_key)} = true refuses to go on: give the same data, or remove the key"
            )
        logger.warning("%s", message)
