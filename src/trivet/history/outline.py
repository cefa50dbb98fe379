"""Reads events.jsonl line by line, and first for where attempts started and how far the file reaches.

A run may go on while it is checked.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trivet.errors import HistoryError
from trivet.history.replay import Outline
from trivet.telemetry.events import decode_event
from trivet.wire.events import AnyEvent, Start

_START, _ORCHESTRATOR = b'"start"', b'"role":"orchestrator"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The part of events.jsonl that is checked."""

    outline: Outline
    num_bytes: int
    """Length of the complete lines."""
    num_torn: int
    """Bytes after them: of a line that is being written, or was cut short."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of events.jsonl."""

    number: int
    """Line number; the first is 1."""
    place: int
    """Byte offset at which the line begins."""
    text: bytes
    event: AnyEvent


def outline(path: Path, *, does_count_attempts: bool) -> Extent:
    """Read where the attempts started, and the length of the file.

    Args:
        does_count_attempts: as `Outline` has it.

    Raises:
        HistoryError: a line is no event, or there is no file to read.
    """
    starts: list[Start] = []
    num_bytes = 0
    has_orchestrator = False
    for line, text in _lines(path, num_bytes=None):
        num_bytes += len(text)
        has_orchestrator = has_orchestrator or _ORCHESTRATOR in text
        if _START in text and isinstance(event := _decode(text, path, line), Start):
            starts.append(event)
    return Extent(
        outline=Outline(
            start_steps=frozenset(int(event.from_step) for event in starts),
            has_orchestrator=has_orchestrator,
            first_step=int(starts[0].from_step) if starts else 0,
            does_count_attempts=does_count_attempts,
        ),
        num_bytes=num_bytes,
        num_torn=_num_torn(path, num_bytes),
    )


def _num_torn(path: Path, num_bytes: int) -> int:
    with path.open("rb") as file:
        file.seek(num_bytes)
        rest = file.read()
    return 0 if b"\n" in rest else len(rest)  # else lines that came since


def read_lines(path: Path, *, first: int = 0, num_bytes: int | None = None) -> Iterator[Line]:
    """Events with their lines, of the `num_bytes` after the byte `first`.

    Raises:
        HistoryError: a line is no event.
    """
    place = first
    for number, text in _lines(path, first=first, num_bytes=num_bytes):
        yield Line(number, place, text, _decode(text, path, number))
        place += len(text)


def _lines(path: Path, *, first: int = 0, num_bytes: int | None) -> Iterator[tuple[int, bytes]]:
    left = num_bytes
    try:
        file = path.open("rb")
    except OSError as exc:
        raise HistoryError(f"{path} cannot be read: {exc.strerror}; it must be the file of events that the run wrote") from exc
    with file:
        file.seek(first)
        for line, text in enumerate(file, start=1):
            if left is not None:
                left -= len(text)
                if left < 0:
                    return
            if text.endswith(b"\n"):  # else a last line that is being written, or was cut short by a crash
                yield line, text


def _decode(text: bytes, path: Path, line: int) -> AnyEvent:
    try:
        return decode_event(text)
    except msgspec.DecodeError as exc:
        # Garbage must not reach the terminal as its control sequences.
        shown = ascii(text[:120].decode(errors="replace").rstrip())
        raise HistoryError(
            f"{path}:{line} is no event of this version ({exc}): {shown}; check it with the version that "
            "wrote it, or mend the line"
        ) from exc
