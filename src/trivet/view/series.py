"""Keeps metrics as columns that grow with their files, and makes curves of about a thousand points of them.

A file of ten thousand steps holds about a hundred metrics in 25 MB: only the columns that somebody asked for are kept.
"""

import math
import os
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from trivet.storage.durable import DECODE_ERRORS
from trivet.view.files import GrowingLines, NotServed

KEYS = ("step", "time")
_MAX_STEP = 2**53
"""A line of a later step is damaged: floats no longer tell such steps apart."""
_MAX_NAMES = 2000
"""Metrics of one file that are kept or listed; bounds what a damaged file, or who asks for names that are not there, costs."""


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


class MetricFile:
    """Reads one file of metrics/. One thread uses it at a time."""

    def __init__(self, root: Path, path: Path) -> None:
        self._root, self._path = root, path
        self._groups: list[_Columns] = []
        self._place: dict[str, tuple[_Columns, int]] = {}
        self._newest = GrowingLines(root, path)
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
                _append(group, line)

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
        lines = GrowingLines(self._root, self._path)
        for line in _ends(lines):
            for name in _names_in(line):
                if len(self._names) < _MAX_NAMES:
                    self._names[name] = None
        return list(self._names)

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


def _append(group: _Columns, line: bytes) -> None:
    try:
        found = msgspec.structs.astuple(group.decoder.decode(line))
    except DECODE_ERRORS:
        group.num_damaged += 1
        return
    if not abs(found[0]) <= _MAX_STEP:
        group.num_damaged += 1
        return
    for column, value in zip(group.values, found, strict=True):
        column.append(value)


def _ends(lines: GrowingLines) -> Sequence[bytes]:
    """Return some of the first lines and the last whole ones, without reading what lies between."""
    try:
        with lines.open() as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(_END_BYTES).split(b"\n")
            file.seek(max(0, size - _END_BYTES))
            tail = file.read(_END_BYTES).split(b"\n")
    except (OSError, NotServed):
        return []
    return [*head[:8], *tail[-8:]]


_END_BYTES = 1 << 18


def _names_in(line: bytes) -> Iterable[str]:
    try:
        found = msgspec.json.decode(line)
    except DECODE_ERRORS:
        return ()
    return (name for name in found if name not in KEYS) if isinstance(found, dict) else ()
