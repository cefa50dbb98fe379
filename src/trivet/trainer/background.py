"""What is written beside the steps: one piece of work at a time on a thread of its own, and its failure told to the loop.

Used by `trainer.session` for policies and by `trainer.checkpoint.part_writer` for checkpoints.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkTimes:
    seconds: float
    cpu_s: float
    """Processor time of the thread: what it takes from the training where cores are few."""


class Background:
    """
    >>> background = Background("publisher")
    >>> background.start(work)
    >>> background.raise_failure()  # between steps
    >>> background.wait()
    >>> background.close()
    """

    def __init__(self, name: str, *, is_async: bool = True) -> None:
        """
        Args:
            is_async: `start` returns while the work goes on; else once it is done.
        """
        self._name = name
        self._is_async = is_async
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._is_closed = False
        self._running: Future[None] | None = None
        self._newest: WorkTimes | None = None

    @property
    def running(self) -> Future[None] | None:
        """What was begun last, until its end was asked for; whoever depends on it may wait for it on another thread."""
        return self._running

    def start(self, work: Callable[[], None]) -> None:
        """Once what was begun before has ended. Raises what that met, or, unless asynchronous, this."""
        self.wait()
        self._running = self._thread.submit(self._do, work)
        if not self._is_async:
            self.wait()

    def wait(self) -> None:
        """Returns once nothing goes on; raises what it met."""
        if self._running is not None:
            running, self._running = self._running, None
            running.result()

    def raise_failure(self) -> None:
        """Raise what failed work met, without waiting for work that goes on."""
        if self._running is not None and self._running.done():
            self.wait()

    def take_times(self) -> WorkTimes | None:
        """Of the newest work that ended well; None if none did since it was last asked."""
        newest, self._newest = self._newest, None
        return newest

    def close(self) -> None:
        """Let what goes on end; what it met is logged if nobody asked for it. May be called again."""
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
