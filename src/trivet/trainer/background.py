"""Runs writes on a thread of their own while training continues, one at a time. The loop is told when a write fails.

Used by `trainer.policy_publisher` for policies and by `trainer.checkpoint.part_writer` for checkpoints.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkTimes:
    """The times that one piece of work took."""

    seconds: float
    cpu_s: float
    """Processor seconds of the thread: with few cores, training has that much less."""


class Background:
    """A thread that does one piece of work after the other."""

    def __init__(self, name: str, *, is_async: bool = True) -> None:
        """Start no thread yet.

        Args:
            name: names the thread, and the work in the log.
            is_async: `start` returns while the work is running; otherwise it returns once the work is done.
        """
        self._name = name
        self._is_async = is_async
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._is_closed = False
        self._running: Future[None] | None = None
        self._newest: WorkTimes | None = None

    @property
    def running(self) -> Future[None] | None:
        """The work begun last, until `wait` or `raise_failure` has seen it end; another thread may wait for it."""
        return self._running

    def start(self, work: Callable[[], None]) -> None:
        """Begin `work` once the work before it has ended. Raise the error of that work or, if not asynchronous, of this one."""
        self.wait()
        self._running = self._thread.submit(self._do, work)
        if not self._is_async:
            self.wait()

    def wait(self) -> None:
        """Wait until no work is running; raise its error if it failed."""
        if self._running is not None:
            running, self._running = self._running, None
            running.result()

    def raise_failure(self) -> None:
        """Raise the error of work that failed, without waiting for work that is still running."""
        if self._running is not None and self._running.done():
            self.wait()

    def take_times(self) -> WorkTimes | None:
        """Return the times of the newest work that succeeded, once; None if there is none since the last call."""
        newest, self._newest = self._newest, None
        return newest

    def close(self) -> None:
        """Wait for running work to end, and log its error if no caller has seen it. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        self._thread.shutdown(wait=True)
        if self._running is not None and (failure := self._running.exception()) is not None:
            logger.error("%s failed: %s: %s", self._name, type(failure).__name__, failure)

    def _do(self, work: Callable[[], None]) -> None:
        started, started_cpu = time.monotonic(), time.thread_time()
        work()
        self._newest = WorkTimes(seconds=time.monotonic() - started, cpu_s=time.thread_time() - started_cpu)
