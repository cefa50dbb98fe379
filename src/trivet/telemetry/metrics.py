"""Writes metrics/<role>.jsonl: one object per step."""

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from trivet.durable import write_atomically


class _StepOnly(msgspec.Struct):
    step: int


class MetricsWriter:
    """Appends one line per step; each is in the file when `write` returns.

    >>> writer = MetricsWriter(path, resume_step=0)
    >>> writer.write(1, {"loss/mean": 0.5})
    >>> writer.close()
    """

    def __init__(self, path: Path, *, resume_step: int = 0, clock: Callable[[], float] = lambda: time.time()) -> None:
        """
        Args:
            resume_step: lines of later steps, left by an earlier attempt, are removed: those steps happen again.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        _keep_until(path, resume_step)
        self._file = path.open("ab", buffering=0)
        self._clock = clock

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """A value that is NaN or infinite is left out: it does not exist in this step."""
        numbers = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        self._file.write(msgspec.json.encode({"step": step, "time": self._clock(), **numbers}) + b"\n")

    def close(self) -> None:
        self._file.close()


def _keep_until(path: Path, step: int) -> None:
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith(b"\n") and _step_of(line) <= step]
    if len(kept) < len(lines):
        write_atomically(path, b"".join(kept))


def _step_of(line: bytes) -> int:
    return msgspec.json.decode(line, type=_StepOnly).step
