"""Receives the pulses of one worker and says for how long its event loop has been blocked. Owned by `client.WorkerClient`."""

import asyncio
import math
import socket
from collections.abc import Callable

from trivet.errors import MessageRefused
from trivet.wire.codec import decode
from trivet.wire.workers import PULSE_INTERVAL_S, Pulse

_PULSE_BYTES = 65_536
"""More than a pulse has: what does not fit would be cut off."""
_BLOCKED_AFTER_S = 3 * PULSE_INTERVAL_S
"""A worker counts as blocked when no pulse came, or its event loop did not turn, for longer than this. One late pulse is common
on a busy machine."""


class PulseMonitor:
    """The newest pulse of one worker, and when it came."""

    def __init__(self, sock: socket.socket, *, clock: Callable[[], float], on_fault: Callable[[str], None]) -> None:
        """Take over `sock` and listen to it on the running event loop.

        Args:
            on_fault: called with the end of a sentence when what comes is no pulse. It ends the worker.
        """
        self._sock = sock
        self._clock = clock
        self._on_fault = on_fault
        self._newest: Pulse | None = None
        self._received_at = 0.0
        self._is_expected = False
        self._lags: list[float] = []
        sock.setblocking(False)
        asyncio.get_running_loop().add_reader(sock.fileno(), self._receive)

    @property
    def num_generating(self) -> int:
        """Rollouts that wait for the model."""
        return self._newest.num_generating if self._newest else 0

    @property
    def num_scoring(self) -> int:
        """Rollouts in the environment's own code."""
        return self._newest.num_scoring if self._newest else 0

    def scoring_for_s(self) -> float:
        """Return the age of the oldest group that is being scored, in seconds."""
        if self._newest is None or not self._newest.num_scoring:
            return 0.0
        return self._newest.scoring_for_s + self._silent_for_s()

    def blocked_for_s(self) -> float:
        """Return for how many seconds the worker's event loop has not turned; 0 while it is well, and while it loads."""
        if self._newest is None:
            return silent_s if self._is_expected and (silent_s := self._silent_for_s()) > _BLOCKED_AFTER_S else 0.0
        silent_s, loop_age_s = self._silent_for_s(), self._newest.loop_age_s
        return loop_age_s + silent_s if max(silent_s, loop_age_s) > _BLOCKED_AFTER_S else 0.0

    def expect(self) -> None:
        """Count the worker's silence from now: it has loaded its environment, and sends pulses from before that on."""
        self._is_expected = True
        self._received_at = self._clock()

    def restart_silence(self) -> None:
        """Count the worker's silence from now: the pool itself did not run for a while, so it could not hear a pulse."""
        self._received_at = self._clock()

    def take_lags(self) -> list[float]:
        """Return by how many seconds the worker's event loop was late, for each measurement since the last call."""
        lags, self._lags = self._lags, []
        return lags

    def close(self) -> None:
        """Stop listening. May be called again."""
        if self._sock.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._sock.fileno())
            self._sock.close()

    def _silent_for_s(self) -> float:
        return self._clock() - self._received_at

    def _receive(self) -> None:
        try:
            data = self._sock.recv(_PULSE_BYTES)
        except BlockingIOError:
            return
        if not data:
            self.close()
            return
        try:
            pulse = decode(data, Pulse)
        except MessageRefused as exc:
            self._refuse(f"sent what is not a pulse: {exc}")
            return
        if not all(map(math.isfinite, (pulse.loop_age_s, pulse.scoring_for_s, *pulse.lags_s))):
            self._refuse("sent a pulse whose times are no numbers")
            return
        self._newest = pulse
        self._received_at = self._clock()
        self._lags.extend(pulse.lags_s)

    def _refuse(self, fault: str) -> None:
        self.close()
        self._on_fault(fault)
