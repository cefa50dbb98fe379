"""Keeps Python's garbage collector from stopping the event loop. Used by the loop, for the time that it runs.

A full collection looks at every object that may be part of a cycle: with ten thousand rollouts in flight and the modules of the
libraries, a fifth of a second at a time, every second. Hardly anything here is in cycles, so full collections happen by the
clock instead of by the number of objects, and never look at what was there at the start.
"""

import asyncio
import gc
from collections.abc import Generator
from contextlib import contextmanager

_YOUNG_OBJECTS = 50_000
"""New objects until the young ones are looked at, which takes milliseconds."""
_YOUNG_COLLECTIONS = 20
"""Collections of the young until the middle generation is looked at too."""
_NEVER = 1_000_000
"""A threshold of the full collection that no run reaches."""
_FULL_INTERVAL_S = 60.0
"""Between two full collections, each of which stops the event loop for about a fifth of a second."""


@contextmanager
def rare_collections() -> Generator[None, None, None]:
    """Within it no full collection happens by itself; afterwards all is as before."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _YOUNG_COLLECTIONS, _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


async def collect_by_the_clock() -> None:
    """A full collection now and then, so that cycles of long-lived objects do not pile up. Until cancelled."""
    while True:
        await asyncio.sleep(_FULL_INTERVAL_S)
        gc.collect()
