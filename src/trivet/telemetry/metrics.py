"""Writes and reads metrics/<role>.jsonl, one object per step; computes statistics of an array and durations as metrics."""

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
    """Appends one line per step; each is in the file when `write` returns."""

    def __init__(
        self,
        path: Path,
        *,
        resume_step: int = 0,
        clock: Callable[[], float] = lambda: time.time(),
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the file for appending, without the lines of steps that happen again.

        Args:
            resume_step: lines of later steps, left by an earlier attempt, are removed: those steps happen again.
            check: called before each line; raises when this role must not write any more.
        """
        check()
        path.parent.mkdir(parents=True, exist_ok=True)
        _keep_until(path, resume_step)
        self._file = path.open("ab", buffering=0)
        self._clock = clock
        self._check = check

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append the metrics of a step. A value that is NaN or infinite is left out: it does not exist in this step."""
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
    """The lines in their order, each with an integer `step`."""
    num_damaged: int
    """Lines that are none; a last line without its end, which may still be written, does not count."""


def read_metrics(path: Path) -> MetricRows:
    """Return the rows of a file that may be damaged, be written to, or not exist."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    rows = [_row_of(line) for line in lines if line]
    whole = [row for row in rows if row is not None]
    return MetricRows(rows=whole, num_damaged=len(rows) - len(whole))


def _keep_until(path: Path, step: int) -> None:
    if not path.exists():
        return
    lines = path.read_bytes().split(b"\n")
    rows = [(line, _row_of(line)) for line in lines[:-1]]  # the last was cut short, or is empty
    kept = [line + b"\n" for line, row in rows if row is not None and row["step"] <= step]
    if num_damaged := sum(row is None for _, row in rows):
        logger.warning("removed damaged lines from %s: lines=%s", path, num_damaged)
    if len(kept) < len(rows) or lines[-1]:
        write_atomically(path, b"".join(kept))


def _row_of(line: bytes) -> dict[str, Any] | None:
    try:
        row = msgspec.json.decode(line, type=dict[str, Any])
    except DECODE_ERRORS:
        return None
    return row if type(row.get("step")) is int else None


def summarize(name: str, values: np.ndarray) -> dict[str, float]:
    """Return `name`/mean, /median, /std, /min and /max of `values`; nothing when it is empty.

    A NaN in `values` makes all five NaN, which a metrics file leaves out: it is never averaged away.

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
    """Add the seconds of the block to `times["time/<name>"]`; those of a block that raises are not counted."""
    started = time.monotonic()
    yield
    key = f"time/{name}"
    times[key] = times.get(key, 0.0) + time.monotonic() - started
