"""Tells the trainer of a live run which policies `eval` still needs, so that retention keeps them.

An acknowledgement expires after some minutes and is renewed until then: a killed evaluation does not keep policies for ever. Only
a run's weights directory is written to, and only where its own readers write.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

from trivet.config.layout import RunLayout
from trivet.storage.durable import is_listed
from trivet.weights.retention import acknowledge, forget_reader
from trivet.wire.versions import PolicyVersion

logger = logging.getLogger(__name__)

_LIFETIME_S = 600.0
"""After this time an acknowledgement expires. A renewal may fail nine times before."""
_RENEW_INTERVAL_S = 60.0


class WeightsReader:
    """This evaluation among the readers of a run's policies."""

    def __init__(self, weights_dir: Path | None, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        layout = None if weights_dir is None else RunLayout(weights_dir.absolute().parent)
        self._layout = layout if weights_dir is not None and weights_dir.name == "weights" else None
        self._name = f"eval-{socket.gethostname()}-{os.getpid()}"
        self._sleep = sleep
        self._needed: int | None = None

    def need(self, step: int) -> None:
        """Have the policy of `step` and all newer ones kept, and release older ones."""
        self._needed = step
        if self._layout is None or not is_listed(self._layout.readers):
            return
        try:
            acknowledge(self._layout, self._name, PolicyVersion(step), lifetime_s=_LIFETIME_S)
        except OSError as exc:
            logger.warning(
                "%s cannot be written: policies may be removed before they are evaluated: %s", self._layout.readers, exc
            )
            self._layout = None

    async def run(self) -> None:
        """Renew the acknowledgement, until cancelled."""
        while True:
            await self._sleep(_RENEW_INTERVAL_S)
            if self._needed is not None:
                self.need(self._needed)

    def close(self) -> None:
        """Release every policy. May be called again."""
        if self._layout is not None:
            forget_reader(self._layout, self._name)
        self._layout = None
