"""Reads and writes run.json, which says whose run a directory holds; an attempt that another has followed writes nothing more."""

import os
import time
from collections.abc import Callable

import msgspec

from trivet.config.layout import RunLayout
from trivet.config.schema.shared import RunIdentity
from trivet.errors import CheckpointError
from trivet.storage.durable import DECODE_ERRORS, write_json_atomically

_CHECK_INTERVAL_S = 0.5
"""Another attempt begins seconds after this one was last seen alive. So a role that runs need not look before each write."""


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of run.json."""

    id: str
    attempt: int
    started: float
    """Unix seconds of this attempt."""
    pid: int
    node: str = ""
    """Host name of the machine on which `pid` is the launcher's."""


def read_run(layout: RunLayout) -> RunRecord | None:
    """Return the record of the run that wrote this directory, or None when there is no readable one."""
    try:
        return msgspec.json.decode(layout.run_file.read_bytes(), type=RunRecord)
    except (OSError, *DECODE_ERRORS):
        return None


def write_run(layout: RunLayout, run: RunIdentity) -> None:
    """Note that an attempt begins, under this process."""
    record = RunRecord(id=run.id, attempt=run.attempt, started=time.time(), pid=os.getpid(), node=os.uname().nodename)
    write_json_atomically(layout.run_file, record)


def require_newest_attempt(layout: RunLayout, run: RunIdentity) -> None:
    """Refuse what an attempt still writes after another has begun: its first node was cut off, and another took its place.

    Roles that were started by hand, without the launcher's name for the run, are not refused.
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
    """Checks again and again that no later attempt has begun: a machine may have stood still between two writes of a role."""

    def __init__(self, layout: RunLayout, run: RunIdentity, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._layout = layout
        self._run = run
        self._clock = clock
        self._due = clock()

    def check(self) -> None:
        """Look at the record, unless the last look was less than half a second ago."""
        if (now := self._clock()) >= self._due:
            require_newest_attempt(self._layout, self._run)
            self._due = now + _CHECK_INTERVAL_S
