"""Reads events.jsonl line by line, and checks that it holds every line as it was written (`telemetry.events`).

Each role's lines are a chain: a line that was changed, removed, repeated or moved breaks it at the next one. Each line says how
long the file was when it was written: a line that stands earlier has lost something before it, whoever wrote that. Lines that are
missing at the end of the file are not found here; other files tell of those. A run may go on while it is checked.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trivet.errors import HistoryError
from trivet.history.breaches import Invariant, Ledger
from trivet.telemetry.events import chain_value, decode_event, take_apart
from trivet.wire.events import AnyEvent, Start

_START, _ORCHESTRATOR = b'"start"', b'"role":"orchestrator"'
_RECORD = Invariant.INTACT_RECORD


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """Facts about a history that must be known before it is read."""

    start_steps: frozenset[int]
    """Every step that an attempt started from."""
    has_orchestrator: bool
    """False for supervised fine-tuning and for batches that are fed again from disk."""
    first_step: int = 0
    """The step that the first attempt started from; above 0 for a fork of another run."""
    does_count_attempts: bool = False
    """A launcher started the roles: each start of a role is a later attempt."""


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
    with path.open("rb") as file:
        file.seek(num_bytes)
        rest = file.read()
    return Extent(
        outline=Outline(
            start_steps=frozenset(int(event.from_step) for event in starts),
            has_orchestrator=has_orchestrator,
            first_step=int(starts[0].from_step) if starts else 0,
            does_count_attempts=does_count_attempts,
        ),
        num_bytes=num_bytes,
        num_torn=0 if b"\n" in rest else len(rest),  # else lines that came since
    )


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


class ChainHistory:
    """Follows the chain of each role's lines."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._last: dict[str, bytes] = {}
        self.num_unsealed = 0
        """Lines that carry no chain: of versions that wrote none."""

    def read(self, line: Line) -> None:
        """Check one line against the last line of its role."""
        role, place = line.event.role, line.place
        parts, last = take_apart(line.text), self._last.get(role)
        ledger = self._ledger
        ledger.checks += 1
        if parts is None:
            if last is not None:
                ledger.breach(_RECORD, f"the line carries no chain, and earlier lines of the {role} do")
            self.num_unsealed += 1
            return
        last = last or b""
        ledger.checks += 1
        if parts.chain != chain_value(parts.content, last):
            ledger.breach(
                _RECORD, f"the chain of the {role} breaks: this line, or one before it, was changed, removed or moved"
            )
        if place + parts.start < parts.offset:
            ledger.breach(
                _RECORD,
                f"the line was written at byte {parts.offset} or later and stands at byte {place + parts.start}: "
                "something before it was removed or moved",
            )
        self._last[role] = parts.chain

    def report_not_examined(self) -> None:
        """Put what was not looked at into the ledger."""
        self._ledger.line = None
        if self.num_unsealed:
            self._ledger.not_examined.append(
                f"the chain of {self.num_unsealed:,} lines: they carry none, as those of older versions"
            )
        self._ledger.not_examined.append("edits that recompute the chain")
