"""Keeps the metrics of all roles as columns that grow with their files, and makes curves of about a thousand points of them.

A file of ten thousand steps holds about a hundred metrics in 25 MB: only the columns that somebody asked for are kept.
"""

import math
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from trivet.config.layout import RunLayout
from trivet.storage.durable import DECODE_ERRORS
from trivet.view.files import FileStamp, GrowingLines, NotServed, check_inside, is_inside, stamp_of

KEYS = ("step", "time")
_MAX_STEP = 2**53
"""A line of a later step is damaged: floats no longer tell such steps apart."""
_MAX_NAMES = 2000
"""Metrics of one file that are kept or listed; bounds what a damaged file, or who asks for names that are not there, costs."""
_END_BYTES = 1 << 18
"""Read of each end of a file to list its metrics: hundreds of lines."""


@dataclass(frozen=True, slots=True)
class MetricKey:
    """A metric and the file that holds it, written `trainer:loss/mean`."""

    role: str
    """The name of its file in metrics/."""
    name: str

    @classmethod
    def parse(cls, text: str) -> "MetricKey":
        """Return the key that `text` writes."""
        role, _, name = text.partition(":")
        return cls(role, name)

    def __str__(self) -> str:
        return f"{self.role}:{self.name}"


REWARD = MetricKey("orchestrator", "reward/mean")
LOSS = MetricKey("trainer", "loss/mean")
ENTROPY = MetricKey("trainer", "entropy/mean")
MISMATCH = MetricKey("trainer", "mismatch_kl/mean")
THROUGHPUT = MetricKey("trainer", "perf/throughput")
STEP_TIME = MetricKey("trainer", "time/step")
SHOWN_FIRST = [
    REWARD,
    LOSS,
    ENTROPY,
    MISMATCH,
    MetricKey("orchestrator", "probe/mismatch"),
    MetricKey("orchestrator", "batch/off_policy_level/mean"),
    THROUGHPUT,
    STEP_TIME,
    MetricKey("trainer", "time/wait_for_batch"),
    MetricKey("trainer", "optim/grad_norm"),
    MetricKey("orchestrator", "completion_len/mean"),
    MetricKey("orchestrator", "is_truncated/mean"),
    MetricKey("orchestrator", "error/mean"),
]
PHASES: Mapping[str, list[str]] = {
    "trainer": [
        "time/wait_for_batch",
        "time/forward_backward",
        "time/optimizer",
        "time/wait_for_policy",
        "time/probe",
        "time/broadcast_weights",
        "time/save_ckpt",
    ],
    "orchestrator": ["time/generate_completions", "time/update_weights"],
}
"""What a step of each role consists of, in its order; `time/update_weights` is the server's and lies within others."""
ALWAYS_READ = [*SHOWN_FIRST, *(MetricKey(role, name) for role, names in PHASES.items() for name in ["time/step", *names])]
"""Read together in one pass over the files, whatever is asked for."""
_STANDS_IN = {"trainer": "sft"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points of a metric, each of one step or of several together."""

    steps: list[int]
    """The last step of each point."""
    mean: list[float]
    low: list[float] | None = None
    """Least value of each point's steps; None when every point is one step."""
    high: list[float] | None = None


@dataclass(slots=True)
class _Columns:
    """Some metrics of a file, read together."""

    lines: GrowingLines
    decoder: "msgspec.json.Decoder[msgspec.Struct]"
    names: list[str]
    values: list["array[float]"] = field(default_factory=list)
    num_damaged: int = 0

    def clear(self) -> None:
        self.values = [array("d") for _ in self.names]
        self.num_damaged = 0

    def append(self, line: bytes) -> None:
        try:
            found = msgspec.structs.astuple(self.decoder.decode(line))
        except DECODE_ERRORS:
            self.num_damaged += 1
            return
        if not abs(found[0]) <= _MAX_STEP:
            self.num_damaged += 1
            return
        for column, value in zip(self.values, found, strict=True):
            column.append(value)


class MetricFile:
    """Reads one file of metrics/. One thread uses it at a time."""

    def __init__(self, root: Path, path: Path) -> None:
        self._root, self._path = root, path
        self._groups: list[_Columns] = []
        self._place: dict[str, tuple[_Columns, int]] = {}
        self._names: dict[str, None] = {}

    @property
    def num_damaged(self) -> int:
        """Lines that are no object with a step."""
        return max((group.num_damaged for group in self._groups), default=0)

    def refresh(self, names: Iterable[str]) -> None:
        """Read what was appended, of `names` and of all that was asked for before."""
        unknown = [name for name in dict.fromkeys(names) if name not in self._place and name not in KEYS]
        if unknown and len(self._place) < _MAX_NAMES:
            self._add(unknown)
        for group in self._groups:
            if group.lines.was_replaced():
                group.clear()
            for line in group.lines.read_new():
                group.append(line)

    def is_read(self, name: str) -> bool:
        """Return whether `refresh` was asked for the metric."""
        return name in self._place

    def steps(self, name: str) -> np.ndarray:
        """Return the step of each line, as int64."""
        return self._column(name, 0).astype(np.int64)

    def times(self, name: str) -> np.ndarray:
        """Return the Unix seconds of each line, as float64."""
        return self._column(name, 1)

    def values(self, name: str) -> np.ndarray:
        """Return the metric of each line as float64: NaN where a line has no such value."""
        return self._column(name, 2 + self._place[name][1])

    def curve(self, name: str, *, num_points: int, first: int | None = None, last: int | None = None) -> Curve:
        """Return the metric over the steps from `first` to `last`, in about `num_points` points."""
        steps, values = self.steps(name), self.values(name)
        keep = np.isfinite(values)
        if first is not None:
            keep &= steps >= first
        if last is not None:
            keep &= steps <= last
        return downsample(steps[keep], values[keep], num_points=num_points)

    def names(self) -> list[str]:
        """Return the metrics of the first and the last lines: what a run measures changes little."""
        for line in self._ends():
            try:
                found = msgspec.json.decode(line, type=dict[str, object])
            except DECODE_ERRORS:
                continue
            for name in found:
                if name not in KEYS and len(self._names) < _MAX_NAMES:
                    self._names[name] = None
        return list(self._names)

    def _ends(self) -> Iterator[bytes]:
        """Yield some of the first lines and the last whole ones, without reading what lies between."""
        try:
            with GrowingLines(self._root, self._path).open() as file:
                yield from file.read(_END_BYTES).split(b"\n")[:8]
                file.seek(max(0, os.fstat(file.fileno()).st_size - _END_BYTES))
                yield from file.read(_END_BYTES).split(b"\n")[-8:]
        except (OSError, NotServed):
            return

    def _column(self, name: str, index: int) -> np.ndarray:
        return np.array(self._place[name][0].values[index])

    def _add(self, names: list[str]) -> None:
        fields = [("step", float), ("time", float, 0.0), *((f"v{index}", float, math.nan) for index in range(len(names)))]
        rename = {f"v{index}": name for index, name in enumerate(names)}
        kind = msgspec.defstruct("MetricLine", fields, rename=rename, gc=False)
        decoder: msgspec.json.Decoder[msgspec.Struct] = msgspec.json.Decoder(kind, strict=True)
        group = _Columns(GrowingLines(self._root, self._path), decoder, [*KEYS, *(f"v{index}" for index in range(len(names)))])
        group.clear()
        self._groups.append(group)
        self._place |= {name: (group, index) for index, name in enumerate(names)}


def downsample(steps: np.ndarray, values: np.ndarray, *, num_points: int) -> Curve:
    """Return means of runs of neighbours, with the least and the greatest value of each: no spike is lost.

    Args:
        steps, values: as long as each other; the values are finite.
    """
    if len(values) <= num_points:
        return Curve(steps=steps.tolist(), mean=_rounded(values))
    starts = np.linspace(0, len(values), num_points + 1)[:-1].astype(np.int64)
    ends = np.append(starts[1:], len(values))
    return Curve(
        steps=steps[ends - 1].tolist(),
        mean=_rounded(np.add.reduceat(values, starts) / (ends - starts)),
        low=_rounded(np.minimum.reduceat(values, starts)),
        high=_rounded(np.maximum.reduceat(values, starts)),
    )


def _rounded(values: np.ndarray) -> list[float]:
    """Round to six digits: more is not seen and costs bytes."""
    return [float(f"{value:.6g}") for value in values.tolist()]


class RunMetrics:
    """Reads the files of metrics/ as they grow. One thread uses it at a time."""

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout
        self._files: dict[str, MetricFile] = {}

    def roles(self) -> list[str]:
        """Return the roles that have a file, leaving out files that lead out of the run."""
        return sorted(path.stem for path in self._layout.metrics.glob("*.jsonl") if is_inside(self._layout.root, path))

    def has(self, role: str) -> bool:
        """Return whether the role has a file."""
        return self._listed(role) is not None

    def path(self, role: str) -> Path:
        """Return where the role's file would lie."""
        return self._layout.metrics / f"{role}.jsonl"

    def stamp(self) -> list[FileStamp | None]:
        """Return a value that changes when any metric does."""
        return [stamp_of(self.path(role)) for role in self.roles()]

    def refresh(self, keys: Iterable[MetricKey]) -> None:
        """Read what was appended; the metrics of `keys` have curves then."""
        wanted: dict[str, list[str]] = {}
        for key in keys:
            wanted.setdefault(key.role, []).append(key.name)
        for role, names in wanted.items():
            if self.has(role) and any(names):
                self.file(role).refresh(name for name in names if name)

    def file(self, role: str) -> MetricFile:
        """Return the reader of a role's file.

        Raises:
            NotServed: there is none of that role.
        """
        # A name of the listing, so that nothing a client sends becomes a path.
        listed = self._listed(role) or "of_no_such_role"
        if listed not in self._files:
            check_inside(self._layout.root, self.path(listed))
            self._files[listed] = MetricFile(self._layout.root, self.path(listed))
        return self._files[listed]

    def curve(self, key: MetricKey, *, num_points: int, first: int | None = None, last: int | None = None) -> Curve | None:
        """Return the metric's curve. None: the role has no file, or the metric was not refreshed."""
        if not self.has(key.role) or not self.file(key.role).is_read(key.name):
            return None
        return self.file(key.role).curve(key.name, num_points=num_points, first=first, last=last)

    def values(self, key: MetricKey) -> np.ndarray:
        """Return the metric of every step that has it, as float64; empty while none has."""
        if not self.has(key.role) or not self.file(key.role).is_read(key.name):
            return np.array([])
        values = self.file(key.role).values(key.name)
        return values[np.isfinite(values)]

    def measured(self) -> list[MetricKey]:
        """Return the keys of all metrics that the run measures."""
        return [MetricKey(role, name) for role in self.roles() for name in sorted(self.file(role).names())]

    def _listed(self, role: str) -> str | None:
        """Return the name of the role's file; supervised fine-tuning takes the trainer's place."""
        roles = self.roles()
        return next((name for name in (role, _STANDS_IN.get(role)) if name in roles), None)

    def num_damaged(self) -> int:
        """Return how many lines of all files are damaged."""
        return sum(file.num_damaged for file in self._files.values())
