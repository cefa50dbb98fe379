"""Tells the trainer of a live run which policies `eval` still needs, so that retention leaves them.

What it says counts for some minutes and is said again while it holds: an evaluation that is killed does not keep anything for ever.
Only the weights directory of a run is written to, and only where the run's own readers are.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

from trivet.config.layout import RunLayout
from trivet.weights.retention import acknowledge, forget_reader
from trivet.wire.versions import PolicyVersion

logger = logging.getLogger(__name__)

_LIFETIME_S = 600.0
_REPEAT_S = 60.0


class WeightsReader:
    """
    >>> reader = WeightsReader(weights_dir)
    >>> reader.need(10)
    >>> saying = tasks.create_task(reader.run())
    >>> reader.close()
    """

    def __init__(self, weights_dir: Path | None, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        layout = None if weights_dir is None else RunLayout(weights_dir.absolute().parent)
        self._layout = layout if weights_dir is not None and weights_dir.name == "weights" else None
        self._name = f"eval-{socket.gethostname()}-{os.getpid()}"
        self._sleep = sleep
        self._needed: int | None = None

    def need(self, step: int) -> None:
        """The policy of `step` and all that are newer are needed, older ones no more."""
        self._needed = step
        if self._layout is None or not self._layout.readers.is_dir():
            return
        try:
            acknowledge(self._layout, self._name, PolicyVersion(step), lifetime_s=_LIFETIME_S)
        except OSError as exc:
            logger.warning(
                "%s cannot be written: policies may be removed before they are evaluated: %s", self._layout.readers, exc
            )
            self._layout = None

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._sleep(_REPEAT_S)
            if self._needed is not None:
                self.need(self._needed)

    def close(self) -> None:
        """May be called again."""
        if self._layout is not None:
            forget_reader(self._layout, self._name)
        self._layout = None
