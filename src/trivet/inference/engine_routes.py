"""Keeps vLLM's record of which of its engines has a request, across a restart of the request. Used by `versioned_engine`.

With data parallelism vLLM's client notes the engine of each request, to send it the abort, and counts the requests of each engine,
to choose the next one. It drops the note and the count when the engine reports that a request has ended, and an engine reports
that of an aborted request too. A request that is aborted and sent again under the same id would lose its note to the late report
about its first attempt: nothing could abort it any more, and its engine would look less loaded than it is.

It must not import vLLM.
"""

from collections.abc import Collection, Container
from typing import Any, Protocol


class RoutingClient(Protocol):
    """vLLM's client of several engines: `DPLBAsyncMPClient`, as of vLLM 0.32."""

    reqs_in_flight: dict[str, Any]
    """The engine of each request, by the request's id."""
    engine_inflight: Any
    """A counter of the requests of each engine."""


class EngineRoutes(dict[str, Any]):
    """The engine of each request. It ignores the report that ends an attempt which was restarted."""

    def __init__(self, client: RoutingClient) -> None:
        """Take over the requests that `client` has noted."""
        super().__init__(client.reqs_in_flight)
        self._client = client
        self._restarted: set[str] = set()
        """Requests whose first attempt the engine has not reported as ended yet."""

    @classmethod
    def install(cls, client: Any) -> "EngineRoutes | None":
        """Make `client` use an instance of this class; None when it has a single engine and keeps no record."""
        if not hasattr(client, "reqs_in_flight"):
            return None
        routes = client.reqs_in_flight = cls(client)
        return routes

    def expect_end_of(self, request_ids: Collection[str]) -> None:
        """Keep the entries of these requests when the engine reports, once for each, that an attempt has ended.

        Call it before the abort is sent: the report may come before the answer.
        """
        self._restarted.update(request_id for request_id in request_ids if request_id in self)

    def forget_all_but(self, request_ids: Container[str]) -> None:
        """Drop the entries of all other requests, and their counts. A report about one of them that comes later does no harm."""
        for request_id in [each for each in self if each not in request_ids]:
            self._client.engine_inflight[super().pop(request_id)] -= 1
        self._restarted.clear()

    def pop(self, request_id: str, default: Any = None) -> Any:  # type: ignore[override]  # as vLLM calls it
        """Remove the entry of a request that has ended and return it; keep it and return `default` for a restarted request."""
        if request_id in self._restarted:
            self._restarted.discard(request_id)
            return default
        return super().pop(request_id, default)
