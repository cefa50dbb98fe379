"""Computes who waits for whom: each role's activity in some steps, and how its time was spent over the whole run.

The roles measure durations. Within a step the durations are drawn one after another, in the order of the role's loop; the last one
ends when the step's line was written.
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
_OTHER = ("other work", "")
_FILLING = PHASES["orchestrator"]["time/generate_completions"]
_HANDING_OVER = ("packs, sends, waits for the acknowledgement", "trainer")
_GENERATING = "generates rollouts"
_LOADING, _ = PHASES["orchestrator"]["time/update_weights"]
_NOTED = {"load", "commit", "restart", "serverdown", "serverup", "stop", "start", "evaluate"}
# `event` is the first field of every line of events.jsonl, so a line need not be decoded to be passed over.
_NOTED_STARTS = tuple(f'{{"event":"{name}"'.encode() for name in sorted(_NOTED))
_MAX_NOTES = 20_000
"""At most this many events are kept in memory, the newest."""


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


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """A stretch of time in which a role had one activity."""

    role: str
    step: int
    start: float
    """Unix seconds."""
    end: float
    activity: str
    waits_for: str
    """The role that this role waits for; empty when it works."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """An activity's part of a role's time, over all its steps."""

    role: str
    activity: str
    waits_for: str
    seconds: float
    fraction: float
    """Of the time of all the role's steps."""


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
                try:
                    self.notes.append(self._decoder.decode(line))
                except DECODE_ERRORS:
                    self.num_damaged += 1
        del self.notes[:-_MAX_NOTES]


def make_timeline(metrics: RunMetrics, notes: Sequence[Note], *, last_step: int | None, num_steps: int) -> Timeline:
    """Lay out the `num_steps` steps that end with `last_step`, or with the newest step when it is None.

    Args:
        metrics: refreshed with `ALWAYS_READ`, which holds every column of `PHASES`.
    """
    columns = {
        role: {
            "step": file.steps(),
            "time": file.values("time"),
            **{name: np.nan_to_num(file.values(name)) for name in (_STEP_S, *phases)},
        }
        for role, phases in PHASES.items()
        if (file := metrics.file(role)) is not None
    }
    newest = max((int(table["step"].max()) for table in columns.values() if len(table["step"])), default=0)
    last = newest if last_step is None else min(last_step, newest)
    first = max(1, last - num_steps + 1)
    spans: list[TimelineSpan] = []
    shares: list[Share] = []
    for role, table in columns.items():
        activities, total = _activities(role, table), float(table[_STEP_S].sum())
        for (activity, waits_for), seconds_of_steps in activities.items():
            seconds = float(seconds_of_steps.sum())
            if total > 0 and seconds > 0:
                shares.append(
                    Share(role=role, activity=activity, waits_for=waits_for, seconds=seconds, fraction=seconds / total)
                )
        for line in np.flatnonzero((table["step"] >= first) & (table["step"] <= last)).tolist():
            step, at = int(table["step"][line]), float(table["time"][line] - table[_STEP_S][line])
            for activity, seconds_of_steps in activities.items():
                end = at + float(seconds_of_steps[line])
                if end > at:
                    spans.append(TimelineSpan(role, step, at, end, *activity))
                    if activity == _FILLING:
                        spans.append(TimelineSpan("inference", step, at, end, _GENERATING, ""))
                at = end
    begin, end = min((span.start for span in spans), default=0.0), max((span.end for span in spans), default=0.0)
    shown = [note for note in notes if begin <= note.time <= end]
    orchestrator = columns.get("orchestrator")
    for note in shown:
        if note.event == "load" and note.version and orchestrator is not None and len(orchestrator["time"]):
            # The event is written when the load is done. The orchestrator's next step records how long the load took.
            line = min(int(np.searchsorted(orchestrator["time"], note.time)), len(orchestrator["time"]) - 1)
            start = note.time - float(orchestrator["time/update_weights"][line])
            spans.append(TimelineSpan("inference", note.version, start, note.time, f"{_LOADING}: {note.version}", ""))
    return Timeline(spans=spans, notes=shown, shares=shares, first_step=first, last_step=last, newest_step=newest)


def _activities(role: str, table: Mapping[str, np.ndarray]) -> dict[tuple[str, str], np.ndarray]:
    """Return the seconds of each activity in each step, in the order of the role's loop."""
    total = table[_STEP_S]
    if role == "trainer":
        phases = {activity: np.maximum(0.0, table[name]) for name, activity in PHASES["trainer"].items()}
        return {**phases, _OTHER: np.maximum(0.0, total - sum(phases.values()))}
    filling = np.minimum(total, table["time/generate_completions"])
    return {_FILLING: filling, _HANDING_OVER: total - filling}
