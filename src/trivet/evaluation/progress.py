"""Shows how far an evaluation is: bars on a terminal, elsewhere a log line from time to time."""

import logging
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

logger = logging.getLogger(__name__)

_REPORT_INTERVAL_S = 10.0


class ProgressView:
    """The progress of the evaluations that run at the same time."""

    def __init__(self, console: Console, *, has_bars: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._bars: Progress | None = None
        if has_bars:
            columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
            self._bars = Progress(TextColumn("{task.description}"), *columns, console=console, transient=True)
        self._clock = clock

    def __enter__(self) -> "ProgressView":
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bars is not None:
            self._bars.stop()

    def begin(self, label: str, *, total: int) -> Callable[[], None]:
        """Show a new evaluation of `total` examples; return the function to call after each of them."""
        if self._bars is not None:
            bars, shown = self._bars, self._bars.add_task(label, total=total)
            return lambda: bars.advance(shown)
        done, reported_at = 0, self._clock()

        def advance() -> None:
            nonlocal done, reported_at
            done += 1
            if done == total or self._clock() - reported_at >= _REPORT_INTERVAL_S:
                reported_at = self._clock()
                logger.info("evaluating %s: %s of %s examples", label, done, total)

        return advance
