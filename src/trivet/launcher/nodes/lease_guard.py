"""Ends a first node that must not lead the run any more, also when its main thread waits for a directory that does not answer.

The supervisor checks the lease in each round. In between it reads logs, and such a read may never return. So a separate thread
watches the lease. It touches no file. When the lease is lost, it ends the processes of this machine, leaves the main thread time to
end the run in order, and then ends this process.
"""

import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType

from trivet.cluster.fence import end_descendants
from trivet.errors import TrivetError
from trivet.launcher.nodes.lease import HeadLease

_POLL_INTERVAL_S = 0.5
_STOP_SHARE = 0.2
"""Share of `lost_after_s` between SIGTERM and SIGKILL. The lease expires at 0.75, so the processes are gone at 0.95, before
another node may lead."""
_ORDERLY_END_S = 10.0
"""Seconds that the main thread has after that to write the status and end this process."""
_PRINT_TIMEOUT_S = 1.0
"""Seconds that the reason may take to be printed: the output may be a file in the directory that does not answer."""


class LeaseGuard:
    """The thread that ends this node when its lease has expired or another node has taken it.

    >>> lease = HeadLease(layout.lease, lost_after_s=30.0)
    >>> with LeaseGuard(lease, lost_after_s=30.0), lease:
    ...     supervise()
    """

    def __init__(
        self,
        lease: HeadLease,
        *,
        lost_after_s: float,
        orderly_end_s: float = _ORDERLY_END_S,
        end_processes: Callable[[float], None] = end_descendants,
        end_this_process: Callable[[int], object] = os._exit,
    ) -> None:
        """Prepare the thread.

        Args:
            orderly_end_s: how long the main thread may take to end this process, once the others have ended.
            end_processes: ends what this process has started, within so many seconds.
            end_this_process: called with the exit code. It must not wait for other threads.
        """
        self._lease = lease
        self._stop_timeout_s = _STOP_SHARE * lost_after_s
        self._orderly_end_s = orderly_end_s
        self._end_processes = end_processes
        self._end_this_process = end_this_process
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lease-guard", daemon=True)

    def __enter__(self) -> "LeaseGuard":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._is_closing.set()
        self._thread.join()

    def _watch(self) -> None:
        while not (self._lease.has_expired or self._lease.is_lost):
            if self._is_closing.wait(_POLL_INTERVAL_S):
                return
        self._end_processes(self._stop_timeout_s)
        if not self._is_closing.wait(self._orderly_end_s):
            self._end_this_process(self._explain())

    def _explain(self) -> int:
        """Print why this node ends; return its exit code."""
        try:
            self._lease.check()
        except TrivetError as exc:
            printing = threading.Thread(target=print, args=(f"node 0: {exc}",), kwargs={"file": sys.stderr}, daemon=True)
            printing.start()
            printing.join(_PRINT_TIMEOUT_S)
            return exc.exit_code
        raise AssertionError("a lease that was lost or has expired stays so")
