"""Records which policy sampled which token. Pure bookkeeping: no engine, no clock of its own.

Weights change only while the engine is paused, and every batch of tokens carries the monotonic time at which the engine made
it. So the policy of a token is the last one whose switch is not later than that time, however late the token arrives here.
"""

from bisect import bisect_right
from collections.abc import Mapping

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
