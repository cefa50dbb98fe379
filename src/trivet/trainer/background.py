"""Runs writes beside the steps: one piece of work at a time on a thread of its own. The loop learns of its failure.

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
    """A thread that does one piece of work after the other.

    >>> background = Background("publisher")
    >>> background.start(work)
    >>> background.raise_failure()  # between steps
    >>> background.wait()
    >>> background.close()
    """

    def __init__(self, name: str, *, is_async: bool = True) -> None:
        """Start no thread yet.

        Args:
            name: names the thread, and the work in the log.
            is_async: `start` returns while the work goes on; otherwise it returns once the work is done.
        """
        self._name = name
        self._is_async = is_async
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._is_closed = False
        self._running: Future[None] | None = None
        self._newest: WorkTimes | None = None

    @property
    def running(self) -> Future[None] | None:
        """The work begun last, until `wait` or `raise_failure` took its end; another thread may wait for it."""
        return self._running

    def start(self, work: Callable[[], None]) -> None:
        """Begin `work` once the work before it has ended. Raises what that met or, if not asynchronous, what this meets."""
        self.wait()
        self._running = self._thread.submit(self._do, work)
        if not self._is_async:
            self.wait()

    def wait(self) -> None:
        """Return once no work goes on; raise what it met."""
        if self._running is not None:
            running, self._running = self._running, None
            running.result()

    def raise_failure(self) -> None:
        """Raise what failed work met, without waiting for work that goes on."""
        if self._running is not None and self._running.done():
            self.wait()

    def take_times(self) -> WorkTimes | None:
        """Return the times of the newest work that succeeded, once; None if there is none since the last call."""
        newest, self._newest = self._newest, None
        return newest

    def close(self) -> None:
        """Let work that goes on end, and log what it met if nobody has asked. May be called again."""
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
