"""Records which policy sampled which token, and which engine has which request. It must not import vLLM.

Weights change only while the engine is paused, and every batch of tokens carries the monotonic time at which the engine made
it. So the policy of a token is the last one whose switch is not later than that time, however late the token arrives here.

With data parallelism vLLM's client notes the engine of each request, to send it the abort, and counts the requests of each engine,
to choose the next one. It drops the note and the count when the engine reports that a request has ended, and an engine reports
that of an aborted request too. A request that is aborted and sent again under the same id would lose its note to the late report
about its first attempt: nothing could abort it any more, and its engine would look less loaded than it is.
"""

from bisect import bisect_right
from collections.abc import Collection, Container, Mapping
from typing import Any

from trivet.wire.versions import START_VERSION, PolicyVersion, VersionRun, join_versions


class PolicyLedger:
    """The times at which the engine switched to each policy."""

    def __init__(self) -> None:
        self._times = [float("-inf")]
        self._versions = [START_VERSION]

    @property
    def current(self) -> PolicyVersion:
        """The version that is served now."""
        return self._versions[-1]

    @property
    def num_switches(self) -> int:
        """Grows with every switch, even back to an earlier version: no two periods of one policy share it."""
        return len(self._times) - 1

    def switch(self, version: PolicyVersion, *, at: float) -> None:
        """Count tokens from `at` on to `version`.

        Args:
            at: monotonic seconds, after the last token of the policy before and before the first of `version`.
        """
        assert at >= self._times[-1]
        self._times.append(at)
        self._versions.append(version)

    def version_at(self, time: float) -> PolicyVersion:
        """Return the version served at `time`, in monotonic seconds."""
        return self._versions[bisect_right(self._times, time) - 1]


class TokenVersions:
    """The policy of each token of one request, which may have several completions."""

    def __init__(self) -> None:
        self._runs: dict[int, list[VersionRun]] = {}

    def record(self, index: int, *, num_tokens: int, version: PolicyVersion) -> None:
        """Count `num_tokens` more tokens of completion `index` to `version`."""
        known = self._runs.get(index, [])
        self._runs[index] = join_versions([known, [VersionRun(version, num_tokens)]])

    @property
    def runs(self) -> Mapping[int, list[VersionRun]]:
        """The runs of tokens of one version, by completion index; a completion without tokens is absent."""
        return self._runs


class EngineRoutes(dict[str, Any]):
    """The engine of each request. It ignores the report that ends an attempt which was restarted."""

    def __init__(self, client: Any) -> None:
        """Take over the requests that `client` has noted: vLLM's client of several engines, `DPLBAsyncMPClient` of vLLM 0.32."""
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
        for request_id in [known for known in self if known not in request_ids]:
            self._client.engine_inflight[super().pop(request_id)] -= 1
        self._restarted.clear()

    def pop(self, request_id: str, default: Any = None) -> Any:  # type: ignore[override]  # as vLLM calls it
        """Remove the entry of a request that has ended and return it; keep it and return `default` for a restarted request."""
        if request_id in self._restarted:
            self._restarted.discard(request_id)
            return default
        return super().pop(request_id, default)
