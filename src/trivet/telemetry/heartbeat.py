"""Tells a monitoring service after every step that the run is alive, by a GET to a URL of the user's."""

import logging
import threading

import httpx

from trivet.process.proxies import PROXY_ERRORS

logger = logging.getLogger(__name__)

_TIMEOUT_S = 10.0
"""Seconds for one call. `close` waits that long for a call under way."""


class Heartbeat:
    """Calls the URL in a thread: while one call is under way, the next beats are left out, so that no step waits.

    >>> heartbeat = Heartbeat("https://uptime.example/heartbeat/abc")
    >>> heartbeat.beat()
    >>> heartbeat.close()
    """

    def __init__(self, url: str, *, transport: httpx.BaseTransport | None = None) -> None:
        """Call nothing yet.

        Args:
            transport: for tests; unset: TCP.
        """
        self._url = url
        self._transport = transport
        self._call: threading.Thread | None = None
        self._has_failed = False

    def beat(self) -> None:
        """Start a call, unless one is under way."""
        if self._call is not None and self._call.is_alive():
            return
        self._call = threading.Thread(target=self._get, name="heartbeat", daemon=True)
        self._call.start()

    def close(self) -> None:
        """Wait for a call under way, for as long as its time-out."""
        if self._call is not None:
            self._call.join(_TIMEOUT_S)

    def _get(self) -> None:
        try:
            with httpx.Client(timeout=_TIMEOUT_S, transport=self._transport) as client:
                client.get(self._url).raise_for_status()
        except (httpx.HTTPError, *PROXY_ERRORS) as exc:
            if not self._has_failed:
                logger.warning("heartbeat.url was not reached: %s; said once, the run goes on", _describe(exc))
            self._has_failed = True
        else:
            self._has_failed = False


def _describe(error: Exception) -> str:
    """Return what went wrong. The text of httpx about an answer names the whole address, with which anyone could send beats."""
    if isinstance(error, httpx.HTTPStatusError):
        return f"the service answered {error.response.status_code}"
    return f"{type(error).__name__}: {error}"
