"""Checks invariants 2 and 4: follows every policy from its publication over the servers that load it to its removal.

Fed with the trainer's publications and removals and the orchestrator's loads. Holds one digest per policy that may still be
loaded.
"""

from trivet.history.breaches import Invariant, Ledger
from trivet.wire.events import Dispatch, Evaluate, Load, ProbeCompared, Publish, Retire, ServerDown, ServerUp
from trivet.wire.versions import START_VERSION, PolicyVersion, Step

_VERSIONS, _READERS = Invariant.VERSIONS_TELL_THE_TRUTH, Invariant.READERS_ARE_SAFE


class PolicyHistory:
    """Holds the digest of each policy, and which server serves which."""

    def __init__(self, ledger: Ledger, *, first_step: int = 0) -> None:
        """Start before the first publication.

        Args:
            first_step: what the run itself began from: policies up to there are another run's, whose publications it copied.
        """
        self._require = ledger.require
        self._first_step = first_step
        self._adopted: dict[int, str] = {}
        """Digest by version of another run's policies, as they were loaded first."""
        self.published: dict[int, str] = {}
        """Digest by version, of those not removed."""
        self.retired: dict[int, str] = {}
        """Digest by version, of those removed."""
        self._from_step = START_VERSION
        self._has_published = False
        """Whether it has published since it started."""
        self._start_digest: str | None = None
        self._held: dict[str, tuple[int, str]] = {}
        """Version and digest by server, since the orchestrator started or the server came back."""
        self._highest: dict[str, int] = {}
        """Highest version by server, since the orchestrator started. It is kept when the server goes down."""
        self._up: set[str] = set()
        self._newest = START_VERSION
        self.num_loads = 0
        self.probe_mismatches: list[float] = []
        """Of every load and comparison at the start that had a probe, in nats."""
        self._probed: set[int] = set()
        """Versions that were published with a probe."""

    @property
    def newest_published(self) -> PolicyVersion:
        """The newest version that the trainer published, or started from."""
        return self._newest

    def start_orchestrator(self) -> None:
        """Forget the servers: they go back to what the run starts from."""
        self._held.clear()
        self._highest.clear()
        self._up.clear()

    def start_trainer(self, from_step: Step) -> None:
        """Forget the policies after `from_step`, which are void."""
        self.published = {version: digest for version, digest in self.published.items() if version <= from_step}
        self.retired = {version: digest for version, digest in self.retired.items() if version <= from_step}
        self._from_step, self._has_published = PolicyVersion(from_step), False
        self._newest = PolicyVersion(from_step)

    def publish(self, event: Publish, *, last_step: int) -> None:
        """Check that a version is published once, after its step."""
        known = self.published.get(event.version)
        self._require(event.version == last_step, _VERSIONS, f"policy {event.version} is published after step {last_step}")
        self._require(
            known in (None, event.digest),
            _VERSIONS,
            f"policy {event.version} is published again with digest {_short(event.digest)}; tokens labelled "
            f"{event.version} were sampled from {_short(known)}",
        )
        self._require(
            known is None or (event.version == self._from_step and not self._has_published),
            _VERSIONS,
            f"policy {event.version} is published twice",
        )
        self._has_published = True
        if event.num_probe_tokens:
            self._probed.add(event.version)
        else:  # found damaged and published again, without its probe: the run then compares it with a new one
            self._probed.discard(event.version)
        self.published[event.version] = event.digest
        self.retired.pop(event.version, None)
        self._newest = max(self._newest, event.version)

    def load(self, event: Load) -> None:
        """Check that a server loads what was published, and never an older version."""
        self.num_loads += 1
        name = f"{event.server} loads policy {event.version}"
        if event.version == START_VERSION:
            self._start_digest = self._start_digest or event.digest
            self._check_digest(name, event.digest, self._start_digest)
        elif self._require(event.version not in self.retired, _READERS, f"{name}, which was removed before"):
            expected = self.published.get(event.version)
            if expected is None and event.version <= self._first_step:
                expected = self._adopted.setdefault(event.version, event.digest)
            if self._require(expected is not None, _VERSIONS, f"{name}, which nobody published"):
                self._check_digest(name, event.digest, expected)
        if event.version in self._probed:
            self._check_probe(name, event.probe_mismatch, event.probe_limit)
        before = self._highest.get(event.server, START_VERSION)
        self._require(event.version >= before, _VERSIONS, f"{name} after policy {before}: versions only grow")
        self._highest[event.server] = event.version
        self._held[event.server] = (event.version, event.digest)

    def compare_probe(self, event: ProbeCompared) -> None:
        """Check that the servers computed what the trainer did for the policy that the run starts from."""
        self._check_probe(f"the start policy {event.version} on {event.num_servers} servers", event.mismatch, event.limit)

    def _check_probe(self, name: str, mismatch: float | None, limit: float | None) -> None:
        held = mismatch is not None and limit is not None and mismatch <= limit
        self._require(
            held,
            _VERSIONS,
            f"{name} and is {mismatch} nats from the trainer's log-probabilities of its probe; allowed are {limit}",
        )
        if mismatch is not None:
            self.probe_mismatches.append(mismatch)

    def server_down(self, event: ServerDown) -> None:
        """Forget what the server held."""
        self._require(event.server in self._up, _VERSIONS, f"{event.server} goes down, which was not up")
        self._up.discard(event.server)
        self._held.pop(event.server, None)

    def server_up(self, event: ServerUp) -> None:
        """Check that the server serves what it loaded last."""
        held = self._held.get(event.server)
        self._require(event.server not in self._up, _VERSIONS, f"{event.server} is up, and comes up again")
        self._require(
            held == (event.version, event.digest),
            _VERSIONS,
            f"{event.server} takes rollouts with policy {event.version} ({_short(event.digest)}); what it loaded last is "
            + (f"policy {held[0]} ({_short(held[1])})" if held else "nothing"),
        )
        self._up.add(event.server)

    def dispatch(self, event: Dispatch) -> None:
        """Check that a server which is up holds the group's version."""
        newest = max((version for version, _ in self._held.values()), default=None)
        self._require(
            newest is not None and event.version <= newest,
            _VERSIONS,
            f"group {event.group_id} is dispatched at policy {event.version}; the newest that a server holds is {newest}",
        )
        if event.server:
            self._require(
                event.server in self._up, _VERSIONS, f"group {event.group_id} goes to {event.server}, which is not up"
            )

    def retire(self, event: Retire) -> None:
        """Check that no server may still read the removed policy."""
        readers = sorted(server for server, (version, _) in self._held.items() if version <= event.version)
        self._require(not readers, _READERS, f"policy {event.version} is removed, and {', '.join(readers)} may still need it")
        self._require(
            event.version in self.published or event.version <= self._first_step,
            _READERS,
            f"policy {event.version} is removed, which was not there",
        )
        self._require(event.version < self._newest, _READERS, f"policy {event.version} is removed, which is the newest")
        self.retired[event.version] = self.published.pop(event.version, "")

    def evaluate(self, event: Evaluate) -> None:
        """Check that the evaluated policy is the published one."""
        known = self.published.get(event.version) or self.retired.get(event.version)
        if event.version == START_VERSION:
            known = self._start_digest
        if known:
            self._check_digest(f"the evaluation of {event.env} measures policy {event.version}", event.digest, known)

    def _check_digest(self, name: str, found: str, expected: str | None) -> None:
        self._require(
            found == expected,
            _VERSIONS,
            f"{name} with digest {_short(found)}; what was published under it has {_short(expected)}",
        )


def _short(digest: str | None) -> str:
    return digest[:12] if digest else "none"
