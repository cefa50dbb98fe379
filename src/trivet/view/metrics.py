"""Reads the metrics of all roles of a run, and names those that are shown first."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trivet.config.layout import RunLayout
from trivet.view.files import FileStamp, check_inside, is_inside, stamp_of
from trivet.view.series import Curve, MetricFile


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
        "time/wait_for_ckpt",
        "time/save_ckpt",
    ],
    "orchestrator": ["time/generate_completions", "time/update_weights"],
}
"""What a step of each role consists of, in its order; `time/update_weights` is the server's and lies within others."""
ALWAYS_READ = [*SHOWN_FIRST, *(MetricKey(role, name) for role, names in PHASES.items() for name in ["time/step", *names])]
"""Read together in one pass over the files, whatever is asked for."""
_STANDS_IN = {"trainer": "sft"}


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
