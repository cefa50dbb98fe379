"""Ends the processes of a node that misses the driver, before the driver starts others in their place.

Ray has no such fence: a machine that was cut off keeps its actors for minutes while others replace them. What counts here is when
the newest state was observed that the driver has received, so a line that is cut in one direction only counts as cut.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from trivet.process.lifetime import descendants, read_processes

_ALONE_SHARE = 0.5
"""Share of `lost_after_s` after which a node that misses the driver ends its processes. The driver waits for all of it."""
_STOP_SHARE = 0.25
"""Share of `lost_after_s` that the processes have between SIGTERM and SIGKILL."""
_POLL_INTERVAL_S = 0.1


def is_missed(contact_at: float, *, lost_after_s: float, now: float) -> bool:
    """Return whether a node misses the driver, so that it must not run processes of the run.

    Args:
        contact_at: when the newest state was observed that the driver is known to have received.
    """
    return now - contact_at > _ALONE_SHARE * lost_after_s


class Fence:
    """The thread that ends all descendants of this process while the driver is missed.

    It touches no file outside /proc and waits for no other thread: the shared directory may not answer either.
    """

    def __init__(self, is_missed: Callable[[], bool], *, lost_after_s: float, on_end: Callable[[], None]) -> None:
        """Start the thread.

        Args:
            on_end: called after the processes have ended, each time that the driver came to be missed. It may hang.
        """
        self._is_missed = is_missed
        self._stop_timeout_s = _STOP_SHARE * lost_after_s
        self._on_end = on_end
        threading.Thread(target=self._watch, name="fence", daemon=True).start()

    def _watch(self) -> None:
        was_missed = False
        while True:
            time.sleep(_POLL_INTERVAL_S)
            is_missed = self._is_missed()
            if is_missed:  # in every round, because a start may have been under way
                end_descendants(0.0 if was_missed else self._stop_timeout_s)
                if not was_missed:
                    threading.Thread(target=self._on_end, name="note-fence", daemon=True).start()
            was_missed = is_missed


def end_descendants(timeout_s: float) -> None:
    """End all descendants of this process: SIGTERM, then after `timeout_s` SIGKILL. No file outside /proc is read."""
    deadline = time.monotonic() + timeout_s
    if timeout_s:
        _signal(_running_descendants(), signal.SIGTERM)
    while (running := _running_descendants()) and time.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL_S)
    _signal(running, signal.SIGKILL)


def _running_descendants() -> list[int]:
    """Return the descendants that still run. Zombies are left out: the thread that reaps them may hang."""
    table = read_processes()
    return [pid for pid in descendants(os.getpid(), table=table) if table[pid].state != "Z"]


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
