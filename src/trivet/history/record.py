"""Reads events.jsonl line by line, and checks that every line is as it was written (`telemetry.events`).

The lines of each role form a chain of hashes. A line that was changed, removed, repeated or moved breaks the chain at the
next line. Each line has the length of the file at the time when it was written. If a line now starts earlier than that,
something before it is missing. The events of each role form attempts: a start, events in the order of its clock, and a stop
unless the role was killed. Lines that are missing at the end of the file are not found here, but by comparison with other
files (`history.files`). The run may continue while it is checked.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trivet.errors import HistoryError
from trivet.history.ledger import Invariant, Ledger
from trivet.telemetry.events import chain_value, decode_event, take_apart
from trivet.wire.events import AnyEvent, Start, Stop

_RECORD, _ONCE = Invariant.INTACT_RECORD, Invariant.EXACTLY_ONCE
_START, _ORCHESTRATOR = b'"start"', b'"role":"orchestrator"'
_LAUNCHER = "launcher"
"""Role of the launcher, which writes events between the attempts of other roles and no `start`."""
_ORDERLY = ("done", "preempted", "exhausted")
"""Reasons of a `stop` after which the role has left nothing unfinished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """Facts about a history that must be known before it is read."""

    start_steps: frozenset[int]
    """Every step that an attempt started from."""
    has_orchestrator: bool
    """False for supervised fine-tuning, and for a trainer that reads recorded batches."""
    first_step: int = 0
    """The step that the first attempt started from; above 0 for a fork of another run."""
    does_count_attempts: bool = False
    """True when a launcher started the roles: then each start has a higher attempt. Roles started by hand may all have
    attempt 1."""
    num_bytes: int = 0
    """Length in bytes of the complete lines, which are checked."""
    num_torn: int = 0
    """Number of bytes after them: a line that is being written, or was cut short."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of events.jsonl."""

    number: int
    """Line number; the first is 1."""
    place: int
    """Byte offset at which the line begins."""
    text: bytes
    event: AnyEvent


def read_outline(path: Path, *, does_count_attempts: bool) -> Outline:
    """Read the steps from which the attempts started, and the length of the file.

    Raises:
        HistoryError: a `start` cannot be decoded, or the file cannot be read.
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
    return Outline(
        start_steps=frozenset(int(event.from_step) for event in starts),
        has_orchestrator=has_orchestrator,
        first_step=int(starts[0].from_step) if starts else 0,
        does_count_attempts=does_count_attempts,
        num_bytes=num_bytes,
        num_torn=0 if b"\n" in rest else len(rest),  # with a line break: lines that were written meanwhile
    )


def read_lines(path: Path, *, first: int = 0, num_bytes: int | None = None) -> Iterator[Line]:
    """Read the events in the `num_bytes` bytes after byte `first`, with their lines. With None read to the end of the file.

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
            if text.endswith(b"\n"):  # a last line without it is being written, or was cut short by a crash
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
    """Checks the chain of hashes in each role's lines."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._last: dict[str, bytes] = {}
        """Chain value of the last line, by role."""

    def read(self, line: Line) -> None:
        """Check one line against the last line of its role."""
        ledger, role, parts = self._ledger, line.event.role, take_apart(line.text)
        ledger.checks += 1
        if parts is None:
            ledger.breach(_RECORD, "the line has no chain value: it was changed, or another version of trivet wrote it")
            return
        ledger.checks += 1
        if parts.start and take_apart(line.text[: parts.start - 1] + b"\n") is not None:
            ledger.breach(
                _RECORD, "a whole event stands before the event in this line: the line break between them was changed"
            )
        if parts.chain != chain_value(parts.content, self._last.get(role, b"")):
            ledger.breach(
                _RECORD, f"the chain of the {role} breaks: this line, or one before it, was changed, removed or moved"
            )
        if line.place + parts.start < parts.offset:
            ledger.breach(
                _RECORD,
                f"the line was written at byte {parts.offset} or later and stands at byte {line.place + parts.start}: "
                "something before it was removed or moved",
            )
        self._last[role] = parts.chain


class RoleHistory:
    """Checks the order of each role's events: attempts, starts, stops and times."""

    def __init__(self, ledger: Ledger, *, does_count_attempts: bool) -> None:
        self._ledger = ledger
        self._does_count_attempts = does_count_attempts
        self.last: dict[str, AnyEvent] = {}
        """The last event by role."""
        self.starts_after_cut: dict[str, list[int]] = {}
        """By role, the steps of starts that followed an attempt without an orderly stop."""
        self._clock_steps: dict[str, tuple[int, float, int | None]] = {}
        """By role, how often its clock went back, the most seconds by which it did, and the first line where it did."""

    def read(self, event: AnyEvent) -> None:
        """Check the event's attempt and time, and that it comes between a start and a stop of its role."""
        ledger, role, last = self._ledger, event.role, self.last.get(event.role)
        self.last[role] = event
        if last is None:
            if not isinstance(event, Start) and role != _LAUNCHER:
                ledger.require(False, _RECORD, f"the {role} writes before its start: the start was removed or moved")
            return
        if isinstance(event, Start):
            is_later = event.attempt > last.attempt or (not self._does_count_attempts and event.attempt == last.attempt)
            ledger.require(is_later, _RECORD, f"the {role} starts as attempt {event.attempt} after attempt {last.attempt}")
            ledger.require(event != last, _RECORD, f"the start of the {role} is there twice")
            if not _is_orderly(last):
                self.starts_after_cut.setdefault(role, []).append(event.from_step)
            return
        ledger.checks += 3
        if isinstance(last, Stop):
            ledger.breach(_ONCE, f"the {role} writes after its stop")
        if event.attempt != last.attempt and not (role == _LAUNCHER and event.attempt > last.attempt):
            ledger.breach(_RECORD, f"the {role} started as attempt {last.attempt} and writes as {event.attempt}")
        if event == last:
            ledger.breach(_RECORD, "this line repeats the line before of the same role, to the same moment")
        elif event.time < last.time:
            count, seconds, line = self._clock_steps.get(role, (0, 0.0, ledger.line))
            self._clock_steps[role] = (count + 1, max(seconds, last.time - event.time), line)

    def is_cut_short(self, role: str) -> bool:
        """Return whether the role's last attempt has no orderly stop: it is running, was killed, or failed."""
        return not _is_orderly(self.last.get(role))

    def report_clocks(self) -> None:
        """Add a remark to the ledger for each clock that went back."""
        for role, (count, seconds, line) in self._clock_steps.items():
            times = "once" if count == 1 else f"{count} times"
            self._ledger.remarks.append(
                f"the clock of the {role} went back {times}, by {seconds:.6g} s at most, first at line {line}"
            )


def _is_orderly(last: AnyEvent | None) -> bool:
    return isinstance(last, Stop) and last.reason in _ORDERLY
