"""Ends a driver that has lost the cluster or the shared directory for `deployment.lost_after_s`.

Such a driver can neither command its nodes nor commit, and another one may lead the run soon. The supervisor asks `check` in each
round and ends the run in order. If it does not come to that, because a read of the directory never returns, the guard ends the
process after a while; Ray then ends the actors, and the kernel their processes.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping

from trivet.errors import NodesMissing, RunDirectoryBusy, TrivetError

_CHECK_INTERVAL_S = 1.0
_ORDERLY_END_S = 10.0
"""Seconds that the main thread has to end this process."""
_PRINT_TIMEOUT_S = 1.0
"""Seconds that the reason may take to be printed: the output may be a file in the directory that does not answer."""


class DriverGuard:
    """Watches whatever a driver must reach.

    >>> guard = DriverGuard({"the Ray cluster": ask_cluster, "output_dir": touch_lock}, lost_after_s=30.0)
    >>> with guard:
    ...     guard.check()
    """

    def __init__(
        self,
        reached: Mapping[str, Callable[[], object]],
        *,
        lost_after_s: float,
        orderly_end_s: float = _ORDERLY_END_S,
        end_this_process: Callable[[int], object] = os._exit,
    ) -> None:
        """Watch nothing yet.

        Args:
            reached: functions that return once something was reached, by its name. They may raise OSError, or hang. What else they
                raise ends the run.
            end_this_process: called with the exit code. It must not wait for other threads.
        """
        self._reached = reached
        self._lost_after_s = lost_after_s
        self._orderly_end_s = orderly_end_s
        self._end_this_process = end_this_process
        self._error: Exception | None = None
        self._at = dict.fromkeys(reached, time.monotonic())
        self._is_closing = threading.Event()

    def __enter__(self) -> "DriverGuard":
        self._at = dict.fromkeys(self._reached, time.monotonic())
        for name in self._reached:
            threading.Thread(target=self._reach, args=(name,), name=f"reach-{name}", daemon=True).start()
        threading.Thread(target=self._watch, name="driver-guard", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closing.set()

    def check(self) -> None:
        """Raise when this driver must not lead the run any more.

        Raises:
            NodesMissing: something was not reached for `lost_after_s`.
            RunDirectoryBusy: another driver leads the run.
            Exception: what `fail` noted.
        """
        if self._error is not None:
            raise self._error

    def fail(self, error: Exception) -> None:
        """Note that this driver must not lead the run any more; the first error counts."""
        self._error = self._error or error

    def _reach(self, name: str) -> None:
        while not self._is_closing.wait(_CHECK_INTERVAL_S):
            try:
                self._reached[name]()
            except OSError:
                continue  # it may answer again in time
            except RunDirectoryBusy as exc:
                self.fail(exc)
                return
            self._at[name] = time.monotonic()

    def _watch(self) -> None:
        while self._error is None:
            if self._is_closing.wait(_CHECK_INTERVAL_S):
                return
            now = time.monotonic()
            for name in [name for name, at in self._at.items() if now - at > self._lost_after_s]:
                missed = f"{name} did not answer for {self._lost_after_s:g} s (deployment.lost_after_s)"
                self.fail(NodesMissing(f"{missed}, so the run ends; start it again"))
        if not self._is_closing.wait(self._orderly_end_s):
            printing = threading.Thread(target=print, args=(f"rl: {self._error}",), kwargs={"file": sys.stderr}, daemon=True)
            printing.start()
            printing.join(_PRINT_TIMEOUT_S)
            self._end_this_process(self._error.exit_code if isinstance(self._error, TrivetError) else 1)
