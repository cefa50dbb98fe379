"""Measures how long the parts of a step take, as metrics."""

import time
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def timed(times: dict[str, float], name: str) -> Generator[None, None, None]:
    """Add the seconds of the block to `times["time/<name>"]`; those of a block that raises are not counted."""
    started = time.monotonic()
    yield
    key = f"time/{name}"
    times[key] = times.get(key, 0.0) + time.monotonic() - started
