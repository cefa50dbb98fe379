"""Gives unused memory of the heap back to the kernel. The trainer calls it after a step, a server after a load.

On a CPU the launcher makes glibc keep freed memory (`launcher.plan`), because a tensor in new memory costs a page fault for every
4 KiB. Tensors differ in size from step to step, so the kept memory fragments: SmolLM2's trainer grew by 30 MB a step, from 3 to
8 GiB within a hundred steps, of which 3 GiB were in use. Giving 2 GiB back and getting them again takes about two seconds.
"""

import ctypes
import logging
import os
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

_MAX_GROWTH = 1.25
"""The resident memory at which the heap is trimmed, as a multiple of what the process needed at its start or after a trim."""
_NUM_MEASURED_CALLS = 5
"""Calls whose largest resident memory counts as what the process needs. It takes several, because steps differ by their batches."""
_MIN_CALLS = 20
"""Fewest calls from one trim to the next, so that batches that really need more cost a trim every 20 steps at most."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Heap:
    """The heap of this process."""

    def __init__(self, *, read_bytes: Callable[[], int] | None = None, trim: Callable[[], None] | None = None) -> None:
        """Begin to measure; tests pass functions that return the resident memory and give free pages back."""
        self._read_bytes = read_bytes or resident_bytes
        self._trim = trim or trim_heap
        self._num_calls = 0
        self._largest_bytes = 0
        """The largest resident memory in the measured calls."""
        self._needed_bytes: int | None = None

    def trim_if_grown(self) -> None:
        """Give free memory back if the process has grown by a quarter over the least that it needed so far."""
        self._num_calls += 1
        found = self._read_bytes()
        if self._num_calls <= _NUM_MEASURED_CALLS:
            self._largest_bytes = max(self._largest_bytes, found)
            return
        if self._num_calls == _NUM_MEASURED_CALLS + 1:
            # A fragmented heap has grown again by the time it is measured, so what was measured before counts too.
            self._needed_bytes = min(self._largest_bytes, self._needed_bytes or self._largest_bytes)
        if self._needed_bytes and self._num_calls >= _MIN_CALLS and found > _MAX_GROWTH * self._needed_bytes:
            self._trim()
            logger.info("heap trimmed from_gib=%.2f to_gib=%.2f", found / 2**30, self._read_bytes() / 2**30)
            self._num_calls = self._largest_bytes = 0


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes; 0 on a system that does not say."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


def trim_heap() -> None:
    """Give every free page of the heap back to the kernel. Does nothing with a C library that has no `malloc_trim`."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
