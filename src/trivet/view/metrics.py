"""Keeps the metrics of all roles as columns that grow with their files, and makes curves of about a thousand points from them.

A file of ten thousand steps has about a hundred metrics and 25 MB. So only the columns that were requested are kept.
"""

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from trivet.config.layout import RunLayout
from trivet.storage.durable import DECODE_ERRORS
from trivet.view.files import FileStamp, GrowingLines, is_inside, stamp_of

KEYS = ("step", "time")
_MAX_STEP = 2**53
"""Largest step. A line with a larger one counts as damaged, because float64 cannot represent all larger integers."""
_MAX_NAMES = 2000
"""Limit of metrics of one file that are kept or listed. It bounds the memory for a damaged file, or for requests with
made-up names."""
_DECODER = msgspec.json.Decoder(dict[str, object])


@dataclass(frozen=True, slots=True)
class MetricKey:
    """A metric and the file that has it. Its text form is `trainer:loss/mean`."""

    role: str
    """The name of its file in metrics/."""
    name: str

    @classmethod
    def parse(cls, text: str) -> "MetricKey":
        """Return the key for its text form."""
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
PHASES: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "trainer": {
        "time/wait_for_batch": ("waits for a batch", "orchestrator"),
        "time/forward_backward": ("forward and backward", ""),
        "time/optimizer": ("optimizer", ""),
        "time/wait_for_policy": ("waits for the last policy's files", "disk"),
        "time/probe": ("scores the policy's probe", ""),
        "time/broadcast_weights": ("publishes weights", ""),
        "time/save_ckpt": ("checkpoint", ""),
    },
    "orchestrator": {
        "time/generate_completions": ("waits for rollouts", "inference"),
        "time/update_weights": ("loads a policy", ""),
    },
}
"""The parts of a step of each role, in their order: by metric the activity, and the role that it waits for; empty where it works.
`time/update_weights` overlaps with others: the servers load a policy meanwhile."""
ALWAYS_READ = [*SHOWN_FIRST, *(MetricKey(role, name) for role, names in PHASES.items() for name in ["time/step", *names])]
"""Metrics that are read in one pass over the files before the first request."""
_SUBSTITUTE_ROLES = {"trainer": "sft"}
"""The role whose file is shown in place of a role's missing file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points of a metric. Each point is one step, or the mean over several."""

    steps: list[int]
    """The last step of each point."""
    mean: list[float]
    low: list[float] | None = None
    """Least value of each point's steps; None when every point is one step."""
    high: list[float] | None = None
    """Greatest value of each point's steps; None when every point is one step."""


class MetricFile:
    """Reads one file of metrics/. Use it from one thread at a time."""

    def __init__(self, root: Path, path: Path) -> None:
        self._root, self._path = root, path
        self._columns: dict[str, array[float]] = {name: array("d") for name in KEYS}
        self._names: dict[str, None] = {}
        self._start()

    def _start(self) -> None:
        """Empty the columns, so that the next `refresh` reads the file from its start."""
        self._lines = GrowingLines(self._root, self._path)
        self._columns = {name: array("d") for name in self._columns}
        self.num_damaged = 0
        """Number of lines that are not an object with a step, or that have a value which is not a number."""

    def refresh(self, names: Iterable[str] = ()) -> None:
        """Read the appended lines, for `names` and all names of earlier calls. If a name is new, read the whole file again."""
        unknown = [name for name in dict.fromkeys(names) if name not in self._columns]
        if unknown and len(self._columns) < _MAX_NAMES:
            self._columns |= {name: array("d") for name in unknown}
            self._start()
        if self._lines.was_replaced():
            self._start()
        for line in self._lines.read_new():
            try:
                row = {"time": 0.0, **_DECODER.decode(line)}
                values = [row.get(name, math.nan) for name in self._columns]
                numbers = [float(value) for value in values if isinstance(value, int | float)]
            except (OverflowError, *DECODE_ERRORS):
                self.num_damaged += 1
                continue
            if len(numbers) < len(self._columns) or not abs(numbers[0]) <= _MAX_STEP:
                self.num_damaged += 1
                continue
            for column, number in zip(self._columns.values(), numbers, strict=True):
                column.append(number)
            if len(self._names) < _MAX_NAMES:
                self._names |= dict.fromkeys(row)

    def is_read(self, name: str) -> bool:
        """Return whether the metric was among the names of a `refresh`."""
        return name in self._columns and name not in KEYS

    def steps(self) -> np.ndarray:
        """Return the step of each line, as int64."""
        return self.values("step").astype(np.int64)

    def values(self, name: str) -> np.ndarray:
        """Return the metric of each line as float64: NaN where a line has no such value. `time` is in Unix seconds."""
        return np.array(self._columns[name])

    def curve(self, name: str, *, num_points: int, first: int | None = None, last: int | None = None) -> Curve:
        """Return the metric over the steps from `first` to `last`, in about `num_points` points."""
        steps, values = self.steps(), self.values(name)
        keep = np.isfinite(values)
        if first is not None:
            keep &= steps >= first
        if last is not None:
            keep &= steps <= last
        return downsample(steps[keep], values[keep], num_points=num_points)

    def names(self) -> list[str]:
        """Return the metrics of all lines."""
        self.refresh()
        return [name for name in self._names if name not in KEYS]


def downsample(steps: np.ndarray, values: np.ndarray, *, num_points: int) -> Curve:
    """Return the mean, the least and the greatest value of each of `num_points` runs of neighbours, so that no spike is lost.

    Args:
        steps, values: arrays of equal length; the values are finite.
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
    """Round to six digits. More digits cannot be seen in a chart and would make the answer longer."""
    return [float(f"{value:.6g}") for value in values.tolist()]


class RunMetrics:
    """Reads the files of metrics/ as they grow. Use it from one thread at a time."""

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout
        self._files: dict[str, MetricFile] = {}

    def roles(self) -> list[str]:
        """Return the roles that have a file in the run. Links to files outside are left out."""
        return sorted(path.stem for path in self._layout.metrics.glob("*.jsonl") if is_inside(self._layout.root, path))

    def stamp(self) -> list[FileStamp | None]:
        """Return a value that changes when any metric does."""
        return [stamp_of(self._layout.metrics / f"{role}.jsonl") for role in self.roles()]

    def refresh(self, keys: Iterable[MetricKey]) -> None:
        """Read the appended lines. Then the metrics of `keys` have curves."""
        wanted: dict[str, list[str]] = {}
        for key in keys:
            wanted.setdefault(key.role, []).append(key.name)
        for role, names in wanted.items():
            if (file := self.file(role)) is not None and any(names):
                file.refresh(name for name in names if name)

    def file(self, role: str) -> MetricFile | None:
        """Return the reader of a role's file; None when there is none. For the trainer it may be the file of supervised
        fine-tuning.
        """
        # Compared with the names of existing files, so that no text from a client becomes a path.
        roles = self.roles()
        listed = next((name for name in (role, _SUBSTITUTE_ROLES.get(role)) if name in roles), None)
        if listed is not None and listed not in self._files:
            self._files[listed] = MetricFile(self._layout.root, self._layout.metrics / f"{listed}.jsonl")
        return self._files[listed] if listed is not None else None

    def curve(self, key: MetricKey, *, num_points: int, first: int | None = None, last: int | None = None) -> Curve | None:
        """Return the metric's curve; None when the role has no file, or the metric was not among the keys of a `refresh`."""
        file = self.file(key.role)
        if file is None or not file.is_read(key.name):
            return None
        return file.curve(key.name, num_points=num_points, first=first, last=last)

    def values(self, key: MetricKey) -> np.ndarray:
        """Return the values of the metric as float64, for the steps that have it; empty when no step has."""
        file = self.file(key.role)
        values = file.values(key.name) if file is not None and file.is_read(key.name) else np.array([])
        return values[np.isfinite(values)]

    def measured(self) -> list[MetricKey]:
        """Return the keys of all metrics in the files of the run."""
        files = {role: self.file(role) for role in self.roles()}
        return [MetricKey(role, name) for role, file in files.items() if file for name in sorted(file.names())]

    def num_damaged(self) -> int:
        """Return how many lines of all files are damaged."""
        return sum(file.num_damaged for file in self._files.values())
