"""Reads and writes run.json: the id of the run in a directory, and its newest attempt. An older attempt writes nothing more."""

import os
import time
from collections.abc import Callable

import msgspec

from trivet.config.layout import RunLayout
from trivet.config.schema.shared import RunIdentity
from trivet.errors import CheckpointError
from trivet.storage.durable import DECODE_ERRORS, write_json_atomically

_CHECK_INTERVAL_S = 0.5
"""Shortest time between two reads of the record. Another attempt begins seconds after this one was last seen alive, so a role that
was not suspended need not read it before each write."""


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of run.json."""

    id: str
    attempt: int
    started: float
    """Start of this attempt, in Unix seconds."""
    pid: int
    """Process id of the attempt's launcher."""
    node: str = ""
    """Host name of the machine on which the launcher runs."""


def read_run(layout: RunLayout) -> RunRecord | None:
    """Return the record of the run that wrote this directory, or None when there is no readable one."""
    try:
        return msgspec.json.decode(layout.run_file.read_bytes(), type=RunRecord)
    except (OSError, *DECODE_ERRORS):
        return None


def write_run(layout: RunLayout, run: RunIdentity) -> None:
    """Write the record of an attempt that begins, with this process as its launcher."""
    record = RunRecord(id=run.id, attempt=run.attempt, started=time.time(), pid=os.getpid(), node=os.uname().nodename)
    write_json_atomically(layout.run_file, record)


def require_newest_attempt(layout: RunLayout, run: RunIdentity) -> None:
    """Refuse to write for an attempt after a later one has begun, because the driver of the old one lost its connection.

    Roles that were started by hand have no id of a run, and are not refused.
    """
    record = read_run(layout)
    if record is None or run.id == RunIdentity().id:
        return
    if record.id != run.id or record.attempt > run.attempt:
        raise CheckpointError(
            f"attempt {record.attempt} of run {record.id} has begun in {str(layout.root)!r}: attempt {run.attempt} of run {run.id}"
            " commits nothing any more"
        )


class AttemptGuard:
    """Checks before a role's writes that no later attempt has begun, because its machine may have been suspended meanwhile."""

    def __init__(self, layout: RunLayout, run: RunIdentity, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._layout = layout
        self._run = run
        self._clock = clock
        self._due = clock()

    def check(self) -> None:
        """Require that no later attempt has begun, unless that was checked less than `_CHECK_INTERVAL_S` ago."""
        if (now := self._clock()) >= self._due:
            require_newest_attempt(self._layout, self._run)
            self._due = now + _CHECK_INTERVAL_S
