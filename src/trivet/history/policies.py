"""Checks invariants 2 and 4: follows every policy from its publication through its loads on servers to its removal.

`RunHistory` passes the trainer's events of publications and removals, and the orchestrator's events of servers and evaluations.
"""

from trivet.history.ledger import Invariant, Ledger
from trivet.wire.events import Dispatch, Evaluate, Load, ProbeCompared, Publish, Retire, ServerDown, ServerUp
from trivet.wire.versions import START_VERSION, PolicyVersion, Step

_VERSIONS, _READERS = Invariant.VERSIONS_TELL_THE_TRUTH, Invariant.READERS_ARE_SAFE


class PolicyHistory:
    """Holds the digest of each policy, and the policy that each server serves."""

    def __init__(self, ledger: Ledger, *, first_step: int = 0) -> None:
        """Start before the first publication.

        Args:
            first_step: the step from which the first attempt of the run started. Older policies are those of another run.
        """
        self._require = ledger.require
        self._first_step = first_step
        self._adopted: dict[int, str] = {}
        """Digests of another run's policies and of the start model, by version, as the first load of each had them."""
        self.published: dict[int, str] = {}
        """Digests of the published policies that are not removed, by version."""
        self.manifests: dict[int, set[str]] = {}
        """SHA-256 of each manifest.json that was published under a version. A policy that a run starts from may have several."""
        self.retired: dict[int, str] = {}
        """Digests of the removed policies, by version."""
        self._from_step = START_VERSION
        self._has_published = False
        """True when the trainer has published a policy since its last start."""
        self._served: dict[str, tuple[int, str]] = {}
        """Version and digest of each server's last load, since the orchestrator started or the server came back."""
        self._highest: dict[str, int] = {}
        """Highest version that each server loaded since the orchestrator started. It is kept when the server goes down."""
        self._up: set[str] = set()
        """The servers that take rollouts."""
        self.newest_published = START_VERSION
        """The newest version that the trainer published, or started from."""
        self.num_loads = 0
        self.probe_mismatches: list[float] = []
        """Mean difference, in nats, of every load and comparison at the start that had a probe."""
        self._probed: set[int] = set()
        """Versions that were published with a probe."""

    def start_orchestrator(self) -> None:
        """Forget the state of all servers, because each loads the policy from which the run starts."""
        self._served.clear()
        self._highest.clear()
        self._up.clear()

    def start_trainer(self, from_step: Step) -> None:
        """Forget the policies after `from_step`, which are void."""
        self.published = {version: digest for version, digest in self.published.items() if version <= from_step}
        self.retired = {version: digest for version, digest in self.retired.items() if version <= from_step}
        self.manifests = {version: digests for version, digests in self.manifests.items() if version <= from_step}
        self._from_step = self.newest_published = PolicyVersion(from_step)
        self._has_published = False

    def publish(self, event: Publish, *, last_step: int) -> None:
        """Check that a version is published after its step, and once. The policy of a resume may be published again."""
        version, known = event.version, self.published.get(event.version)
        self._require(version == last_step, _VERSIONS, f"policy {version} is published after step {last_step}")
        self._require(
            known in (None, event.digest),
            _VERSIONS,
            f"policy {version} is published again with digest {_short(event.digest)}; tokens labelled "
            f"{version} were sampled from {_short(known)}",
        )
        self._require(
            known is None or (version == self._from_step and not self._has_published),
            _VERSIONS,
            f"policy {version} is published twice",
        )
        self._has_published = True
        if event.num_probe_tokens:
            self._probed.add(version)
        else:  # a damaged policy is published again without its probe; the trainer then compares it with a new probe
            self._probed.discard(version)
        self.published[version] = event.digest
        self.manifests.setdefault(version, set()).add(event.manifest_sha256)
        self.retired.pop(version, None)
        self.newest_published = max(self.newest_published, version)

    def load(self, event: Load) -> None:
        """Check that a server loads a published policy, and never an older version than before."""
        self.num_loads += 1
        version, name = event.version, f"{event.server} loads policy {event.version}"
        if self._require(
            version == START_VERSION or version not in self.retired, _READERS, f"{name}, which was removed before"
        ):
            expected = None if version == START_VERSION else self.published.get(version)
            if expected is None and version <= self._first_step:
                expected = self._adopted.setdefault(version, event.digest)
            if self._require(expected is not None, _VERSIONS, f"{name}, which nobody published"):
                self._check_digest(name, event.digest, expected)
        if version in self._probed:
            self._check_probe(name, event.probe_mismatch, event.probe_limit)
        before = self._highest.get(event.server, START_VERSION)
        self._require(version >= before, _VERSIONS, f"{name} after policy {before}: versions only grow")
        self._highest[event.server] = version
        self._served[event.server] = (version, event.digest)

    def compare_probe(self, event: ProbeCompared) -> None:
        """Check that the servers' log-probabilities for the start policy agree with the trainer's."""
        self._check_probe(f"the start policy {event.version} on {event.num_servers} servers", event.mismatch, event.limit)

    def server_down(self, event: ServerDown) -> None:
        """Check that the server was up, and forget the policy that it served."""
        self._require(event.server in self._up, _VERSIONS, f"{event.server} goes down, which was not up")
        self._up.discard(event.server)
        self._served.pop(event.server, None)

    def server_up(self, event: ServerUp) -> None:
        """Check that the server serves the policy that it loaded last."""
        served = self._served.get(event.server)
        self._require(event.server not in self._up, _VERSIONS, f"{event.server} is up, and comes up again")
        self._require(
            served == (event.version, event.digest),
            _VERSIONS,
            f"{event.server} takes rollouts with policy {event.version} ({_short(event.digest)}); what it loaded last is "
            + (f"policy {served[0]} ({_short(served[1])})" if served else "nothing"),
        )
        self._up.add(event.server)

    def dispatch(self, event: Dispatch) -> None:
        """Check that the group's server is up, and that some server serves the group's version."""
        newest = max((version for version, _ in self._served.values()), default=None)
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
        """Check that the removed policy was published, is not the newest, and that no server may still read it."""
        name = f"policy {event.version} is removed"
        readers = sorted(server for server, (version, _) in self._served.items() if version <= event.version)
        self._require(not readers, _READERS, f"{name}, and {', '.join(readers)} may still need it")
        is_known = event.version in self.published or event.version <= self._first_step
        self._require(is_known, _READERS, f"{name}, which was not there")
        self._require(event.version < self.newest_published, _READERS, f"{name}, which is the newest")
        self.retired[event.version] = self.published.pop(event.version, "")

    def evaluate(self, event: Evaluate) -> None:
        """Check that the evaluated policy is the published one."""
        known = self.published.get(event.version) or self.retired.get(event.version)
        if event.version == START_VERSION:
            known = self._adopted.get(START_VERSION)
        if known:
            self._check_digest(f"the evaluation of {event.env} measures policy {event.version}", event.digest, known)

    def _check_probe(self, name: str, mismatch: float | None, limit: float | None) -> None:
        self._require(
            mismatch is not None and limit is not None and mismatch <= limit,
            _VERSIONS,
            f"{name} and is {mismatch} nats from the trainer's log-probabilities of its probe; allowed are {limit}",
        )
        if mismatch is not None:
            self.probe_mismatches.append(mismatch)

    def _check_digest(self, name: str, found: str, expected: str | None) -> None:
        self._require(
            found == expected,
            _VERSIONS,
            f"{name} with digest {_short(found)}; what was published under it has {_short(expected)}",
        )


def _short(digest: str | None) -> str:
    return digest[:12] if digest else "none"
