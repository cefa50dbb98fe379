"""The time as the supervisor and its parts see it; tests pass a clock that they move themselves."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Functions that tell and spend time."""

    now: Callable[[], float] = time.monotonic
    """Monotonic seconds, for durations."""
    unix_time: Callable[[], float] = time.time
    """Seconds since 1970, for people."""
    sleep: Callable[[float], None] = time.sleep


SYSTEM_CLOCK = Clock()
