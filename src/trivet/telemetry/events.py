"""Writes and reads events.jsonl. Every role appends to the same file; a line is one write, so lines never interleave."""

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from trivet.wire.events import AnyEvent, Event

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)
_FIRST_KEY = b'{"event":'
"""How every line starts; within a string its quotes would be escaped."""


class EventWriter:
    """Appends events of one role.

    >>> writer = EventWriter(path, role="trainer", attempt=1)
    >>> writer.write(Commit(step=6))
    >>> writer.close()
    """

    def __init__(self, path: Path, *, role: str, attempt: int, clock: Callable[[], float] = lambda: time.time()) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._role = role
        self._attempt = attempt
        self._clock = clock

    def write(self, event: Event) -> None:
        event.time, event.role, event.attempt = self._clock(), self._role, self._attempt
        line = _encoder.encode(event) + b"\n"
        written = os.write(self._fd, line)
        if written != len(line):
            raise OSError(errno.ENOSPC, f"wrote {written} of {len(line)} bytes of an event", str(self._path))

    def sync(self) -> None:
        """Returns once everything written is on disk."""
        os.fsync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def drop_torn_line(path: Path) -> None:
    """Remove a last line that a crash cut short. Only while nobody writes: before the roles of a resumed run start."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


def read_events(path: Path) -> Iterator[AnyEvent]:
    """Events in the order they were written; a last line cut short by a crash is left out."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield decode_event(line)


def decode_event(line: bytes) -> AnyEvent:
    """The event of one line. What a full disk left of an earlier event in front of it never counted: its writer failed.

    Raises:
        msgspec.DecodeError: there is no whole event in the line.
    """
    try:
        return _decoder.decode(line)
    except msgspec.DecodeError:
        start = line.rfind(_FIRST_KEY)
        if start <= 0:
            raise
        return _decoder.decode(line[start:])
