"""Ends an asyncio program in order after a signal, shows where its tasks wait, and measures the delays of its event loop.

The launcher and the ranks are not asyncio programs: they use `process.signals` alone.
"""

import asyncio
import faulthandler
import gc
import signal
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from types import FrameType, MappingProxyType
from typing import Any

from trivet.errors import first_error
from trivet.process.signals import STACKS_SIGNAL, ending_signals, show_stacks_on_signal

_MAX_DEPTH = 100
"""Limit of nested awaits that are shown for a task."""
_LAG_INTERVAL_S = 0.1
_MAX_LAGS = 36_000
"""Limit of measurements that are kept: those of an hour."""


async def run_until_signalled(
    work: Coroutine[Any, Any, int],
    *,
    handlers: Mapping[signal.Signals, Callable[[], bool]] = MappingProxyType({}),
    is_cleanup_protected: bool = False,
) -> int:
    """Await `work` in this task and cancel it when one of the `ending_signals` comes.

    Args:
        handlers: further signals. The function of each returns whether it has handled the signal; if not, `work` is cancelled.
        is_cleanup_protected: a second signal does not cancel the clean-up that `work` does after the first.

    Returns:
        The result of `work`; 128 + N when signal N cancelled it.

    Raises:
        BaseException: the `first_error` of an exception group that `work` raises.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    received: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        received.append(number)
        if len(received) == 1 or not is_cleanup_protected:
            task.cancel()

    def handle(number: signal.Signals) -> None:
        if not handlers[number]():
            stop(number)

    for number in ending_signals():
        loop.add_signal_handler(number, stop, number)
    for number in handlers:
        loop.add_signal_handler(number, handle, number)
    try:
        return await work
    except asyncio.CancelledError:
        if not received:
            raise
        return 128 + received[0]
    except BaseExceptionGroup as group:
        raise first_error(group) from group


def show_tasks_on_signal() -> None:
    """Make STACKS_SIGNAL also write where the tasks of the running event loop wait. Call it in the main thread."""
    loop = asyncio.get_running_loop()

    def show(number: int, frame: FrameType | None) -> None:
        if not loop.is_closed():
            sys.stderr.write(f"{_describe_tasks(loop)}\n")

    # Not through `loop.add_signal_handler`: when the loop closes, that would also remove the handler that shows the stacks.
    faulthandler.unregister(STACKS_SIGNAL)
    signal.signal(STACKS_SIGNAL, show)
    show_stacks_on_signal(does_call_on=True)


def _describe_tasks(loop: asyncio.AbstractEventLoop) -> str:
    """Return each task's name, and the lines where its coroutine and the awaited ones are suspended, innermost last."""
    lines = ["Tasks (innermost await last):"]
    for task in sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name()):
        lines.append(f"  {task.get_name()}")
        awaited: Any = task.get_coro()
        for _ in range(_MAX_DEPTH):
            if (kind := _kind_of(awaited)) is None:
                # A step of an asynchronous generator, or a wrapper, has no attribute for the coroutine that it runs.
                awaited = next((value for value in gc.get_referents(awaited) if _kind_of(value) is not None), None)
                kind = _kind_of(awaited)
            if kind is None:
                break
            frame = getattr(awaited, f"{kind}_frame")
            lines.append(f"    {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
            awaited = getattr(awaited, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
    return "\n".join(lines)


def _kind_of(awaited: Any) -> str | None:
    """Return the prefix of the attributes of a suspended coroutine, generator or asynchronous generator; None for all else."""
    return next((kind for kind in ("cr", "gi", "ag") if getattr(awaited, f"{kind}_frame", None) is not None), None)


class LoopLag:
    """Measures the delays of an event loop: a task sleeps again and again, and measures how late it is resumed."""

    def __init__(
        self,
        *,
        interval_s: float = _LAG_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._sleep = sleep
        self._lags: deque[float] = deque(maxlen=_MAX_LAGS)
        self.last_turn = clock()
        """Time at which the loop last resumed the task. Another thread may read it."""

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            due = self._clock() + self._interval_s
            await self._sleep(self._interval_s)
            self.last_turn = self._clock()
            self._lags.append(max(self.last_turn - due, 0.0))

    def take(self) -> list[float]:
        """Return the delays in seconds that were measured since the last call. May be called on another thread."""
        return [self._lags.popleft() for _ in range(len(self._lags))]


def lag_metrics(name: str, lags: Sequence[float], statistics: Sequence[str]) -> dict[str, float]:
    """Return the `statistics` (of min, mean, med, p90 and max) of `lags`, in seconds, as metrics; empty without lags."""
    if not lags:
        return {}
    ordered = sorted(lags)
    values = {"min": ordered[0], "mean": sum(ordered) / len(ordered), "max": ordered[-1]}
    values |= {"med": ordered[len(ordered) // 2], "p90": ordered[int(len(ordered) * 0.9)]}
    return {f"{name}/{statistic}": values[statistic] for statistic in statistics}
