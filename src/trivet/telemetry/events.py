"""Writes and reads events.jsonl. All roles append to the same file. Each line is one write, so lines never interleave.

Each line ends in two values, by which a reader finds later changes of the file (`history.record`):

- `offset`: length of the file when the line was written. Other processes may append first, so the line starts there or later.
- `chain`: XXH3 hash of the chain value in the same role's last line, and of this line up to here.
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
"""Start of every line. It occurs nowhere else, because quotes within a string are escaped."""
_OFFSET, _CHAIN = b',"offset":', b',"chain":"'
_END = b'"}\n'


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedLine:
    """The parts of one line of events.jsonl."""

    content: bytes
    """The part of the line over which `chain` is computed."""
    start: int
    """Number of bytes before the event: a torn event that was left there when the disk was full."""
    offset: int
    """Length of the file when the line was written."""
    chain: bytes
    """The chain value, as hexadecimal digits."""


class EventWriter:
    """Appends events of one role. Several threads may call `write`."""

    def __init__(
        self,
        path: Path,
        *,
        role: str,
        attempt: int,
        check: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = lambda: time.time(),
    ) -> None:
        """Open the file for appending, and read the last chain value of the role.

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
        self._last_chain = _read_last_chain(path, role)
        self._lock = threading.Lock()

    def write(self, event: Event) -> None:
        """Append the event as one line. Raises OSError when only a part of it could be written."""
        with self._lock:
            self._check()
            event.time, event.role, event.attempt = self._clock(), self._role, self._attempt
            offset = os.fstat(self._fd).st_size
            line, chain = seal(_encoder.encode(event), offset=offset, last=self._last_chain)
            written = os.write(self._fd, line)
            if written != len(line):
                raise OSError(errno.ENOSPC, f"wrote {written} of {len(line)} bytes of an event", str(self._path))
            self._last_chain = chain

    def sync(self) -> None:
        """Return once all written events are on disk."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the file. May be called again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def seal(event: bytes, *, offset: int, last: bytes = b"") -> tuple[bytes, bytes]:
    """Return the line for an encoded event, and its chain value.

    Args:
        offset: present length of the file.
        last: chain value in the last line of the same role; empty for its first line.
    """
    content = b"%s%s%d" % (event[:-1], _OFFSET, offset)
    chain = chain_value(content, last)
    return content + _CHAIN + chain + _END, chain


def chain_value(content: bytes, last: bytes) -> bytes:
    """Return the hexadecimal XXH3 hash of the last line's chain value and this line's content."""
    return xxhash.xxh3_64_hexdigest(last + content).encode()


def take_apart(line: bytes) -> SealedLine | None:
    """Return the parts of a line; None when it has no `offset` and `chain`, or these are damaged."""
    content, found, rest = line.rpartition(_CHAIN)
    _, has_offset, offset = content.rpartition(_OFFSET)
    if not found or not has_offset or not rest.endswith(_END) or not offset.isdigit():
        return None
    start = max(content.rfind(_FIRST_KEY), 0)
    return SealedLine(content=content[start:], start=start, offset=int(offset), chain=rest[: -len(_END)])


def _read_last_chain(path: Path, role: str) -> bytes:
    """Return the chain value in the last line of `role`; empty when there is none."""
    if not path.stat().st_size:
        return b""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        end = content.rfind(b"\n") + 1
        position = content.rfind(b',"role":"%s","attempt":' % role.encode(), 0, end)
        if position < 0:
            return b""
        line = content[content.rfind(b"\n", 0, position) + 1 : content.find(b"\n", position) + 1]
    parts = take_apart(line)
    return parts.chain if parts is not None else b""


def drop_torn_line(path: Path) -> None:
    """Remove an incomplete last line that a crash left. Call it only before the roles start, while no process writes."""
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
    """Yield the events in the order in which they were written. An incomplete last line is left out."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield decode_event(line)


def decode_event(line: bytes) -> AnyEvent:
    """Return the event in one line. A torn event before it, which was left there when the disk was full, is skipped.

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
