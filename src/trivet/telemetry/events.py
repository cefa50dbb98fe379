"""Writes and reads events.jsonl. Every role appends to the same file; a line is one write, so lines never interleave.

Each line ends in three values that let a reader find whatever happened to the file afterwards (`history.chain`):

- `offset`: how long the file was when the line was written. The line starts there or later, whatever other processes append.
- `chain`: XXH3 over the chain value of the same role's line before, and everything of this line up to here.
- `mac`, if the run signs its events: HMAC-SHA256 over the mac of the same role's line before, and everything up to here.
"""

import errno
import hmac
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
_OFFSET, _CHAIN, _MAC = b',"offset":', b',"chain":"', b',"mac":"'
_END = b'"}\n'


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainLink:
    """The values that a line hands on to the next line of its role."""

    chain: bytes = b""
    mac: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedLine:
    """One line of events.jsonl, taken apart."""

    content: bytes
    """Everything that `chain` covers."""
    signed: bytes
    """Everything that `mac` covers; empty without one."""
    start: int
    """Bytes of the line before the event: what a full disk left of an earlier one."""
    offset: int
    link: ChainLink


class EventWriter:
    """Appends events of one role. Several threads may write.

    >>> writer = EventWriter(path, role="trainer", attempt=1)
    >>> writer.write(Commit(step=6))
    >>> writer.close()
    """

    def __init__(
        self,
        path: Path,
        *,
        role: str,
        attempt: int,
        key: bytes | None = None,
        check: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = lambda: time.time(),
    ) -> None:
        """Open the file for appending, and find where the role's chain ended.

        Args:
            key: signs each line; None: lines carry no `mac`.
            check: called before each event; raises when this role must not write any more.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._role = role
        self._attempt = attempt
        self._key = key
        self._check = check
        self._clock = clock
        self._last = _last_link(path, role)
        self._lock = threading.Lock()

    def write(self, event: Event) -> None:
        """Append the event as one line; raises OSError when the disk took only a part of it."""
        with self._lock:
            self._check()
            event.time, event.role, event.attempt = self._clock(), self._role, self._attempt
            offset = os.fstat(self._fd).st_size
            line, link = seal(_encoder.encode(event), offset=offset, last=self._last, key=self._key)
            written = os.write(self._fd, line)
            if written != len(line):
                raise OSError(errno.ENOSPC, f"wrote {written} of {len(line)} bytes of an event", str(self._path))
            self._last = link

    def sync(self) -> None:
        """Return once everything written is on disk."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the file. May be called again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def seal(event: bytes, *, offset: int, last: ChainLink, key: bytes | None = None) -> tuple[bytes, ChainLink]:
    """Return the line for an encoded event, and what it hands on.

    Args:
        offset: length of the file now.
        last: what the line before of the same role handed on.
    """
    content = b"%s%s%d" % (event[:-1], _OFFSET, offset)
    chain = chain_value(content, last)
    line, mac = content + _CHAIN + chain, b""
    if key is not None:
        signed = line + b'"'
        mac = mac_value(signed, last, key=key)
        line = signed + _MAC + mac
    return line + _END, ChainLink(chain=chain, mac=mac)


def chain_value(content: bytes, last: ChainLink) -> bytes:
    """Return the hexadecimal XXH3 over the last line's chain value and this line's content."""
    return xxhash.xxh3_64_hexdigest(last.chain + content).encode()


def mac_value(signed: bytes, last: ChainLink, *, key: bytes) -> bytes:
    """Return the hexadecimal HMAC-SHA256 over the last line's mac and what this line signs."""
    return hmac.digest(key, last.mac + signed, "sha256").hex().encode()


def take_apart(line: bytes) -> SealedLine | None:
    """Return the parts of a line. None: an older version sealed none, or the seal was altered beyond recognition."""
    content, found, rest = line.rpartition(_CHAIN)
    _, has_offset, offset = content.rpartition(_OFFSET)
    if not found or not has_offset or not rest.endswith(_END) or not offset.isdigit():
        return None
    chain, has_mac, mac = rest[: -len(_END)].partition(b'"' + _MAC)
    signed = b'%s%s%s"' % (content, _CHAIN, chain) if has_mac else b""
    start = max(content.rfind(_FIRST_KEY), 0)
    link = ChainLink(chain=chain, mac=mac)
    return SealedLine(content=content[start:], signed=signed[start:], start=start, offset=int(offset), link=link)


def _last_link(path: Path, role: str) -> ChainLink:
    """Return the state that the last line of `role` in the file handed on."""
    if not path.stat().st_size:
        return ChainLink()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        end = content.rfind(b"\n") + 1
        place = content.rfind(b',"role":"%s","attempt":' % role.encode(), 0, end)
        if place < 0:
            return ChainLink()
        line = content[content.rfind(b"\n", 0, place) + 1 : content.find(b"\n", place) + 1]
    parts = take_apart(line)
    return parts.link if parts is not None else ChainLink()


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
