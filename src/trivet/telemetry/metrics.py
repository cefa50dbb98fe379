"""Writes and reads metrics/<role>.jsonl, with one JSON object per step. Also computes metrics: statistics of an array, and
durations.
"""

import logging
import math
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from trivet.storage.durable import DECODE_ERRORS, write_atomically

logger = logging.getLogger(__name__)


class MetricsWriter:
    """Appends one line per step. The line is in the file when `write` returns."""

    def __init__(
        self,
        path: Path,
        *,
        resume_step: int = 0,
        clock: Callable[[], float] = lambda: time.time(),
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the file for appending.

        Args:
            resume_step: the step from which the run resumes. Lines of later steps are removed, because those steps are done again.
            check: called before each line; raises when this role must not write any more.
        """
        check()
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_lines_after(path, resume_step)
        self._file = path.open("ab", buffering=0)
        self._clock = clock
        self._check = check

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append the metrics of a step. A value that is NaN or infinite is left out: the step has no such metric."""
        self._check()
        numbers = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        self._file.write(msgspec.json.encode({"step": step, "time": self._clock(), **numbers}) + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRows:
    """The lines of a metrics file."""

    rows: list[dict[str, Any]]
    """The objects of the lines in their order, each with an integer `step`."""
    num_damaged: int
    """Number of lines that have no such object. A last line without a line break does not count: it may still be written."""


def read_metrics(path: Path) -> MetricRows:
    """Return the lines of a file that may be damaged, still be written, or not exist."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    decoded = [_decode_line(line) for line in lines if line]
    rows = [values for values in decoded if values is not None]
    return MetricRows(rows=rows, num_damaged=len(decoded) - len(rows))


def _remove_lines_after(path: Path, step: int) -> None:
    """Remove the lines of steps after `step`, and damaged lines."""
    if not path.exists():
        return
    *lines, incomplete = path.read_bytes().split(b"\n")
    decoded = [(line, _decode_line(line)) for line in lines]
    kept = [line + b"\n" for line, values in decoded if values is not None and values["step"] <= step]
    if num_damaged := sum(values is None for _, values in decoded):
        logger.warning("removed damaged lines from %s: lines=%s", path, num_damaged)
    if len(kept) < len(lines) or incomplete:
        write_atomically(path, b"".join(kept))


def _decode_line(line: bytes) -> dict[str, Any] | None:
    """Return the object in a line; None when it is damaged or has no integer `step`."""
    try:
        values = msgspec.json.decode(line, type=dict[str, Any])
    except DECODE_ERRORS:
        return None
    return values if type(values.get("step")) is int else None


def summarize(name: str, values: np.ndarray) -> dict[str, float]:
    """Return `name`/mean, /median, /std, /min and /max of `values`; no metric when it is empty.

    A NaN in `values` makes all five NaN, so the metrics file leaves them out. It is never hidden in an average.

    Args:
        values: any shape and numeric dtype; computed in float64.
    """
    if values.size == 0:
        return {}
    column = np.asarray(values, dtype=np.float64).ravel()
    return {
        f"{name}/mean": float(column.mean()),
        f"{name}/median": float(np.median(column)),
        f"{name}/std": float(column.std()),
        f"{name}/min": float(column.min()),
        f"{name}/max": float(column.max()),
    }


@contextmanager
def timed(times: dict[str, float], name: str) -> Generator[None, None, None]:
    """Add the duration of the block, in seconds, to `times["time/<name>"]`. A block that raises is not counted."""
    started = time.monotonic()
    yield
    key = f"time/{name}"
    times[key] = times.get(key, 0.0) + time.monotonic() - started
