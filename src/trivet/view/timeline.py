"""Computes who waits for whom: each role's activity in some steps, and how its time was spent over the whole run.

Lengths are measured by the roles; within a step they lie in the order of the role's loop, up to the time at which the step's
line was written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from trivet.config.layout import RunLayout
from trivet.storage.durable import DECODE_ERRORS
from trivet.view.files import GrowingLines
from trivet.view.metrics import PHASES, RunMetrics

_STEP_S = "time/step"
_TRAINER_PHASES = {
    "time/wait_for_batch": ("waits for a batch", "orchestrator"),
    "time/forward_backward": ("forward and backward", ""),
    "time/optimizer": ("optimizer", ""),
    "time/wait_for_policy": ("waits for the last policy's files", "disk"),
    "time/broadcast_weights": ("publishes weights", ""),
    "time/save_ckpt": ("checkpoint", ""),
}
_OTHER = ("other work", "")
_FILLING = ("waits for rollouts", "inference")
_HANDING_OVER = ("packs, sends, waits for the receipt", "trainer")
_GENERATING = "generates rollouts"
_LOADING = "loads a policy"
_NOTED = {"load", "commit", "restart", "serverdown", "serverup", "stop", "start", "evaluate"}
_NOTED_STARTS = tuple(f'{{"event":"{name}"'.encode() for name in sorted(_NOTED))
_MAX_NOTES = 20_000
"""The newest events that are kept in memory."""


class Note(msgspec.Struct, kw_only=True):
    """An event that the time line shows."""

    event: str
    time: float
    version: int | None = None
    step: int | None = None
    server: str = ""
    reason: str = ""
    cause: str = ""
    env: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineSpan:
    """A time in which a role did one thing."""

    lane: str
    step: int
    start: float
    """Unix seconds."""
    end: float
    does: str
    waits_for: str
    """The role waited for; empty when it works."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A part of a role's time, over all its steps."""

    lane: str
    does: str
    waits_for: str
    seconds: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Some steps of a run, and each role's time over all of them."""

    spans: list[TimelineSpan]
    notes: list[Note]
    shares: list[Share]
    first_step: int
    last_step: int
    newest_step: int


class NoteReader:
    """Reads the events that a time line shows, out of the many of events.jsonl. One thread uses it at a time."""

    def __init__(self, layout: RunLayout) -> None:
        self._lines = GrowingLines(layout.root, layout.events)
        self._decoder = msgspec.json.Decoder(Note)
        self.notes: list[Note] = []
        self.num_damaged = 0

    def refresh(self) -> None:
        """Read what was appended."""
        if self._lines.was_replaced():
            self.notes, self.num_damaged = [], 0
        for line in self._lines.read_new():
            if line.startswith(_NOTED_STARTS):
                self._add(line)
        del self.notes[:-_MAX_NOTES]

    def _add(self, line: bytes) -> None:
        try:
            self.notes.append(self._decoder.decode(line))
        except DECODE_ERRORS:
            self.num_damaged += 1


def make_timeline(metrics: RunMetrics, notes: Sequence[Note], *, last_step: int | None, num_steps: int) -> Timeline:
    """Return the `num_steps` steps up to `last_step`, or up to the newest.

    Args:
        metrics: refreshed with `ALWAYS_READ`.
    """
    columns = {role: _read(metrics, role) for role in PHASES if metrics.has(role)}
    newest = max((int(table["step"].max()) for table in columns.values() if len(table["step"])), default=0)
    last = newest if last_step is None else min(last_step, newest)
    first = max(1, last - num_steps + 1)
    spans: list[TimelineSpan] = []
    shares: list[Share] = []
    for role, table in columns.items():
        shares += _shares(role, table)
        within = (table["step"] >= first) & (table["step"] <= last)
        part = {name: column[within] for name, column in table.items()}
        spans += _trainer_spans(part) if role == "trainer" else _orchestrator_spans(part)
    begin, end = min((span.start for span in spans), default=0.0), max((span.end for span in spans), default=0.0)
    shown = [note for note in notes if begin <= note.time <= end]
    spans += _load_spans(shown, columns.get("orchestrator"))
    return Timeline(spans=spans, notes=shown, shares=shares, first_step=first, last_step=last, newest_step=newest)


def _read(metrics: RunMetrics, role: str) -> dict[str, np.ndarray]:
    file = metrics.file(role)
    columns = {name: np.nan_to_num(file.values(name)) for name in [_STEP_S, *PHASES[role]]}
    return {"step": file.steps(_STEP_S), "time": file.times(_STEP_S), **columns}


def _trainer_spans(table: Mapping[str, np.ndarray]) -> list[TimelineSpan]:
    spans: list[TimelineSpan] = []
    for row, step in enumerate(table["step"].tolist()):
        end = float(table["time"][row])
        at = end - float(table[_STEP_S][row])
        for name, (does, waits_for) in _TRAINER_PHASES.items():
            seconds = float(table[name][row])
            if seconds > 0:
                spans.append(
                    TimelineSpan(lane="trainer", step=step, start=at, end=at + seconds, does=does, waits_for=waits_for)
                )
                at += seconds
        if at < end:
            spans.append(TimelineSpan(lane="trainer", step=step, start=at, end=end, does=_OTHER[0], waits_for=_OTHER[1]))
    return spans


def _orchestrator_spans(table: Mapping[str, np.ndarray]) -> list[TimelineSpan]:
    spans: list[TimelineSpan] = []
    for row, step in enumerate(table["step"].tolist()):
        end = float(table["time"][row])
        start = end - float(table[_STEP_S][row])
        filled = min(end, start + float(table["time/generate_completions"][row]))
        for lane, begin, until, (does, waits_for) in (
            ("orchestrator", start, filled, _FILLING),
            ("inference", start, filled, (_GENERATING, "")),  # what the orchestrator waits for
            ("orchestrator", filled, end, _HANDING_OVER),
        ):
            spans.append(TimelineSpan(lane=lane, step=step, start=begin, end=until, does=does, waits_for=waits_for))
    return spans


def _load_spans(notes: Sequence[Note], orchestrator: Mapping[str, np.ndarray] | None) -> list[TimelineSpan]:
    """Return the loads of policies. A load is noted when it is done; the orchestrator's step after it has its length."""
    loads = [note for note in notes if note.event == "load" and note.version]
    if orchestrator is None or not len(orchestrator["time"]):
        return []
    spans: list[TimelineSpan] = []
    for note in loads:
        row = min(int(np.searchsorted(orchestrator["time"], note.time)), len(orchestrator["time"]) - 1)
        seconds = float(orchestrator["time/update_weights"][row])
        does = f"{_LOADING}: {note.version}"
        start = note.time - seconds
        spans.append(
            TimelineSpan(lane="inference", step=note.version or 0, start=start, end=note.time, does=does, waits_for="")
        )
    return spans


def _shares(role: str, table: Mapping[str, np.ndarray]) -> list[Share]:
    total = float(table[_STEP_S].sum())
    if total <= 0:
        return []
    if role == "trainer":
        parts = {activity: float(table[name].sum()) for name, activity in _TRAINER_PHASES.items()}
        parts[_OTHER] = max(0.0, total - sum(parts.values()))
    else:
        filling = min(total, float(table["time/generate_completions"].sum()))
        parts = {_FILLING: filling, _HANDING_OVER: total - filling}
    return [
        Share(lane=role, does=does, waits_for=waits_for, seconds=seconds, share=seconds / total)
        for (does, waits_for), seconds in parts.items()
        if seconds > 0
    ]
