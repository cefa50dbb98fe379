"""Logs a warning that strangers can cause as often as they like, in at most one line a minute."""

import logging
import time
from collections.abc import Callable

_INTERVAL_S = 60.0
"""Seconds between two lines: often enough to be seen, too seldom to fill a log."""


class RepeatedWarning:
    """Use it from one thread at a time."""

    def __init__(self, logger: logging.Logger, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._num_unsaid = 0
        self._said_at = float("-inf")

    def say(self, text: str) -> None:
        """Log `text`, unless something was logged less than a minute ago; then the next line says how often it was."""
        now = self._clock()
        if now - self._said_at < _INTERVAL_S:
            self._num_unsaid += 1
            return
        more = f" (and {self._num_unsaid} more since the last such line)" if self._num_unsaid else ""
        self._said_at, self._num_unsaid = now, 0
        self._logger.warning("%s%s", text, more)
