"""Measures how late an event loop is: the time beyond its due that a sleeping task waits to be called again."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

_INTERVAL_S = 0.1
_MAX_KEPT = 36_000
"""Measurements: an hour of them."""


class LoopLag:
    """A task that sleeps again and again and measures how late it is woken."""

    def __init__(
        self,
        *,
        interval_s: float = _INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._sleep = sleep
        self._lags: deque[float] = deque(maxlen=_MAX_KEPT)
        self.last_turn = clock()
        """When the loop last called the task; another thread may read it."""

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            due = self._clock() + self._interval_s
            await self._sleep(self._interval_s)
            self.last_turn = self._clock()
            self._lags.append(max(self.last_turn - due, 0.0))

    def take(self) -> list[float]:
        """Return the seconds of each measurement since the last call; another thread may ask."""
        return [self._lags.popleft() for _ in range(len(self._lags))]


def lag_metrics(name: str, lags: Sequence[float], numbers: Sequence[str]) -> dict[str, float]:
    """Return `numbers` (min, mean, med, p90, max) of `lags`, in seconds; nothing when there are none."""
    if not lags:
        return {}
    ordered = sorted(lags)
    known = {
        "min": ordered[0],
        "mean": sum(ordered) / len(ordered),
        "med": ordered[len(ordered) // 2],
        "p90": ordered[min(int(len(ordered) * 0.9), len(ordered) - 1)],
        "max": ordered[-1],
    }
    return {f"{name}/{number}": known[number] for number in numbers}
