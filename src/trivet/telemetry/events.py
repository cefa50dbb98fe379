"""Writes and reads events.jsonl. Every role appends to the same file; a line is one write, so lines never interleave.

Each line ends in two values that let a reader find whatever happened to the file afterwards (`history.record`):

- `offset`: how long the file was when the line was written. The line starts there or later, whatever other processes append.
- `chain`: XXH3 over the chain value of the same role's line before, and everything of this line up to here.
"""

import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from trivet.storage.durable import DECODE_ERRORS
from trivet.wire.events import AnyEvent, Event

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)
_FIRST_KEY = b'{"event":'
"""Start of every line; within a string its quotes would be escaped."""
_OFFSET, _CHAIN = b',"offset":', b',"chain":"'
_END = b'"}\n'


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedLine:
    """One line of events.jsonl, taken apart."""

    content: bytes
    """Everything that `chain` covers."""
    start: int
    """Bytes of the line before the event: what a full disk left of an earlier one."""
    offset: int
    chain: bytes


class EventWriter:
    """Appends events of one role. Several threads may write."""

    def __init__(
        self,
        path: Path,
        *,
        role: str,
        attempt: int,
        check: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = lambda: time.time(),
    ) -> None:
        """Open the file for appending, and find where the role's chain ended.

        Args:
            check: called before each event; raises when this role must not write any more.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._role = role
        self._attempt = attempt
        self._check = check
        self._clock = clock
        self._last = _last_chain(path, role)
        self._lock = threading.Lock()

    def write(self, event: Event) -> None:
        """Append the event as one line; raises OSError when the disk took only a part of it."""
        with self._lock:
            self._check()
            event.time, event.role, event.attempt = self._clock(), self._role, self._attempt
            offset = os.fstat(self._fd).st_size
            line, chain = seal(_encoder.encode(event), offset=offset, last=self._last)
            written = os.write(self._fd, line)
            if written != len(line):
                raise OSError(errno.ENOSPC, f"wrote {written} of {len(line)} bytes of an event", str(self._path))
            self._last = chain

    def sync(self) -> None:
        """Return once everything written is on disk."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the file. May be called again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def seal(event: bytes, *, offset: int, last: bytes = b"") -> tuple[bytes, bytes]:
    """Return the line for an encoded event, and its chain value.

    Args:
        offset: length of the file now.
        last: chain value of the line before of the same role.
    """
    content = b"%s%s%d" % (event[:-1], _OFFSET, offset)
    chain = chain_value(content, last)
    return content + _CHAIN + chain + _END, chain


def chain_value(content: bytes, last: bytes) -> bytes:
    """Return the hexadecimal XXH3 over the last line's chain value and this line's content."""
    return xxhash.xxh3_64_hexdigest(last + content).encode()


def take_apart(line: bytes) -> SealedLine | None:
    """Return the parts of a line. None: an older version sealed none, or the seal was altered beyond recognition."""
    content, found, rest = line.rpartition(_CHAIN)
    _, has_offset, offset = content.rpartition(_OFFSET)
    if not found or not has_offset or not rest.endswith(_END) or not offset.isdigit():
        return None
    start = max(content.rfind(_FIRST_KEY), 0)
    return SealedLine(content=content[start:], start=start, offset=int(offset), chain=rest[: -len(_END)])


def _last_chain(path: Path, role: str) -> bytes:
    """Return the chain value of the last line of `role` in the file."""
    if not path.stat().st_size:
        return b""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        end = content.rfind(b"\n") + 1
        place = content.rfind(b',"role":"%s","attempt":' % role.encode(), 0, end)
        if place < 0:
            return b""
        line = content[content.rfind(b"\n", 0, place) + 1 : content.find(b"\n", place) + 1]
    parts = take_apart(line)
    return parts.chain if parts is not None else b""


def drop_torn_line(path: Path) -> None:
    """Remove a last line that a crash cut short. Only while nobody writes: before the roles of a resumed run start."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


def num_complete_bytes(path: Path) -> int:
    """Return the length of the file up to the end of its last complete line."""
    if not path.exists() or not path.stat().st_size:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.rfind(b"\n") + 1


def read_events(path: Path) -> Iterator[AnyEvent]:
    """Yield events in the order they were written; a last line cut short by a crash is left out."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield decode_event(line)


def decode_event(line: bytes) -> AnyEvent:
    """Return the event of one line, without what a full disk left of an earlier event in front of it: its writer failed.

    Raises:
        msgspec.DecodeError: there is no whole event in the line.
    """
    try:
        return _decoder.decode(line)
    except DECODE_ERRORS as exc:
        start = line.rfind(_FIRST_KEY)
        if start <= 0:
            raise msgspec.DecodeError(str(exc)) from exc
    try:
        return _decoder.decode(line[start:])
    except DECODE_ERRORS as exc:
        raise msgspec.DecodeError(str(exc)) from exc
