"""The first look at events.jsonl: where attempts started, and how far the file reaches, so that a run may go on meanwhile."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trivet.errors import HistoryError
from trivet.history.replay import ORCHESTRATOR, Outline
from trivet.telemetry.events import decode_event
from trivet.wire.events import AnyEvent, Start

_START = b'"start"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    outline: Outline
    first_step: int
    """What the orchestrator's first attempt started from; above 0 for a fork of another run."""
    num_bytes: int
    """Length of the complete lines."""


def outline(path: Path) -> Extent:
    """
    Raises:
        HistoryError: a line is no event.
    """
    starts: list[Start] = []
    num_bytes = 0
    for line, text in _lines(path, num_bytes=None):
        num_bytes += len(text)
        if _START in text and isinstance(event := _decode(text, path, line), Start):
            starts.append(event)
    of_orchestrator = [event for event in starts if event.role == ORCHESTRATOR]
    return Extent(
        outline=Outline(
            start_steps=frozenset(int(event.from_step) for event in starts), has_orchestrator=bool(of_orchestrator)
        ),
        first_step=of_orchestrator[0].from_step if of_orchestrator else 0,
        num_bytes=num_bytes,
    )


def read_numbered(path: Path, *, num_bytes: int) -> Iterator[tuple[int, AnyEvent]]:
    """Events with their line numbers, up to `num_bytes`.

    Raises:
        HistoryError: a line is no event.
    """
    for line, text in _lines(path, num_bytes=num_bytes):
        yield line, _decode(text, path, line)


def _lines(path: Path, *, num_bytes: int | None) -> Iterator[tuple[int, bytes]]:
    left = num_bytes
    with path.open("rb") as file:
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
