"""Records which policy sampled which token, and which engine has which request. This module must not import vLLM.

Policies change only while the engine is paused, and every batch of tokens comes with the monotonic time at which the engine sampled
it. So the policy of a token is the last policy whose switch is not later than that time, however late the token arrives here.

With data parallelism a server has several engines. vLLM's client records the engine of each request, to send an abort there, and
counts the requests of each engine, to choose the engine of the next request. It drops both when the engine reports that a request
has ended. An engine reports this of an aborted request too. If a request is aborted and sent again under the same id, the late
report about its first attempt would remove the record of its second attempt. Then nothing could abort that attempt, and its engine
would appear less loaded than it is. `RequestEngines` ignores such reports.
"""

from bisect import bisect_right
from collections.abc import Collection, Container
from typing import Any

from trivet.wire.versions import START_VERSION, PolicyVersion, VersionRun, join_versions


class PolicyLedger:
    """The times at which the engine switched to each policy."""

    def __init__(self) -> None:
        self._times = [float("-inf")]
        self._versions = [START_VERSION]

    @property
    def num_switches(self) -> int:
        """The number of switches so far. It also grows with a switch back to an earlier version."""
        return len(self._times) - 1

    def switch(self, version: PolicyVersion, *, at: float) -> None:
        """Record that tokens sampled from `at` on are of `version`.

        Args:
            at: monotonic seconds, after the last token of the previous policy and before the first token of `version`.
        """
        assert at >= self._times[-1]
        self._times.append(at)
        self._versions.append(version)

    def version_at(self, time: float) -> PolicyVersion:
        """Return the version that was served at `time`, in monotonic seconds."""
        return self._versions[bisect_right(self._times, time) - 1]


class TokenVersions:
    """The policy of each token of one request, which may have several completions."""

    def __init__(self) -> None:
        self.runs: dict[int, list[VersionRun]] = {}
        """The runs (consecutive tokens of one version) of each completion by its index. A completion without tokens is absent."""

    def record(self, index: int, *, num_tokens: int, version: PolicyVersion) -> None:
        """Count `num_tokens` more tokens of completion `index` to `version`."""
        earlier = self.runs.get(index, [])
        self.runs[index] = join_versions([earlier, [VersionRun(version, num_tokens)]])


class RequestEngines(dict[str, Any]):
    """Maps each request to its engine, in place of the dict of vLLM's client. It ignores reports that end a restarted attempt."""

    def __init__(self, client: Any) -> None:
        """Copy the entries of `client`: vLLM's client of several engines, `DPLBAsyncMPClient` of vLLM 0.32."""
        super().__init__(client.reqs_in_flight)
        self._client = client
        self._restarted: set[str] = set()
        """Requests whose first attempt the engine has not reported as ended yet."""

    @classmethod
    def install(cls, client: Any) -> "RequestEngines | None":
        """Make `client` use an instance of this class, and return it; None for a client of one engine, which keeps no record."""
        if not hasattr(client, "reqs_in_flight"):
            return None
        engines = client.reqs_in_flight = cls(client)
        return engines

    def expect_end_of(self, request_ids: Collection[str]) -> None:
        """Ignore one report for each of these requests that an attempt has ended.

        Call this method before the abort is sent: the report may come before the answer to the abort.
        """
        self._restarted.update(request_id for request_id in request_ids if request_id in self)

    def forget_all_but(self, request_ids: Container[str]) -> None:
        """Drop the entries of all other requests, and their counts. A later report about a dropped request does no harm."""
        for request_id in [recorded for recorded in self if recorded not in request_ids]:
            self._client.engine_inflight[super().pop(request_id)] -= 1
        self._restarted.clear()

    def pop(self, request_id: str, default: Any = None) -> Any:  # type: ignore[override]  # as vLLM calls it
        """Remove and return the entry of a request that has ended. For a restarted request keep the entry and return `default`."""
        if request_id in self._restarted:
            self._restarted.discard(request_id)
            return default
        return super().pop(request_id, default)
