"""Tells a monitoring service after every step that the run is alive, by a GET to a URL of the user's."""

import logging
import threading

import httpx

logger = logging.getLogger(__name__)

_TIMEOUT_S = 10.0


class Heartbeat:
    """A step never waits for the service: while one call is under way the next beats are left out.

    >>> heartbeat = Heartbeat("https://uptime.example/heartbeat/abc")
    >>> heartbeat.beat()
    >>> heartbeat.close()
    """

    def __init__(self, url: str, *, transport: httpx.BaseTransport | None = None) -> None:
        """
        Args:
            transport: for tests; unset: TCP.
        """
        self._url = url
        self._client = httpx.Client(timeout=_TIMEOUT_S, transport=transport)
        self._call: threading.Thread | None = None
        self._has_failed = False

    def beat(self) -> None:
        if self._call is not None and self._call.is_alive():
            return
        self._call = threading.Thread(target=self._get, name="heartbeat", daemon=True)
        self._call.start()

    def close(self) -> None:
        """Waits for a call under way, for as long as its time-out."""
        if self._call is not None:
            self._call.join(_TIMEOUT_S)
        self._client.close()

    def _get(self) -> None:
        try:
            self._client.get(self._url).raise_for_status()
        except httpx.HTTPError as exc:
            if not self._has_failed:
                logger.warning("heartbeat.url was not reached: %s; said once, the run goes on", _describe(exc))
            self._has_failed = True
        else:
            self._has_failed = False


def _describe(error: httpx.HTTPError) -> str:
    """Return what went wrong. The text of httpx about an answer names the whole address, with which anyone could send beats."""
    if isinstance(error, httpx.HTTPStatusError):
        return f"the service answered {error.response.status_code}"
    return f"{type(error).__name__}: {error}"
