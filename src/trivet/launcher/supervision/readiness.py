"""Whether inference servers answer."""

import http.client
from collections.abc import Sequence
from urllib.parse import urlsplit

_INTERVAL_S = 2.0
_TIMEOUT_S = 1.0


class ReadyProbe:
    """Tells once of each server when it has begun to answer; after `again` anew.

    >>> probe = ReadyProbe(["http://127.0.0.1:8000/v1"])
    >>> probe.look(now=clock())
    ['http://127.0.0.1:8000/v1']
    """

    def __init__(self, base_urls: Sequence[str]) -> None:
        self._base_urls = list(base_urls)
        self._waiting = list(base_urls)
        self._next_at = 0.0

    @property
    def are_all_ready(self) -> bool:
        return not self._waiting

    def again(self) -> None:
        """The servers were started again."""
        self._waiting = list(self._base_urls)

    def look(self, *, now: float) -> list[str]:
        """Those that have begun to answer."""
        if not self._waiting or now < self._next_at:
            return []
        self._next_at = now + _INTERVAL_S
        ready = [url for url in self._waiting if answers(url)]
        self._waiting = [url for url in self._waiting if url not in ready]
        return ready


def answers(base_url: str) -> bool:
    """Whether GET /health of the server at `base_url` says 200."""
    parts = urlsplit(base_url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
