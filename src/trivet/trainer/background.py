"""Runs writes on a thread of their own while training continues, one at a time. The loop gets the error of a write that failed.

Used by `trainer.session`.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

logger = logging.getLogger(__name__)


class BackgroundWriter:
    """Runs one piece of work after the other on a thread."""

    def __init__(self, name: str, *, is_async: bool = True) -> None:
        """Name the thread, and the work in the log. Without `is_async`, `start` returns once the work is done."""
        self._name = name
        self._is_async = is_async
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._newest: tuple[float, float] | None = None
        self.running: Future[None] | None = None
        """The newest work, until `wait` or `raise_failure` has seen it end. Another thread may wait for it."""

    def start(self, work: Callable[[], None]) -> None:
        """Begin `work` once the work before it has ended. Raise the error of that work or, if not asynchronous, of this one."""

        def measure() -> None:
            started, started_cpu = time.monotonic(), time.thread_time()
            work()
            self._newest = time.monotonic() - started, time.thread_time() - started_cpu

        self.wait()
        self.running = self._thread.submit(measure)
        if not self._is_async:
            self.wait()

    def wait(self) -> None:
        """Wait until no work is running; raise its error if it failed."""
        if self.running is not None:
            running, self.running = self.running, None
            running.result()

    def raise_failure(self) -> None:
        """Raise the error of work that failed, without waiting for work that is still running."""
        if self.running is not None and self.running.done():
            self.wait()

    def take_times(self) -> tuple[float, float] | None:
        """Return the wall-clock and the processor seconds of the newest work that succeeded; None if an earlier call did."""
        newest, self._newest = self._newest, None
        return newest

    def close(self) -> None:
        """Wait for running work to end, and log its error if no caller has seen it. May be called again."""
        self._thread.shutdown(wait=True)
        if self.running is not None:
            running, self.running = self.running, None
            if (failure := running.exception()) is not None:
                logger.error("%s failed: %s: %s", self._name, type(failure).__name__, failure)
