"""Holds the state of a run's servers: which take rollouts, which policy they are to serve, how many rollouts each has in flight.

`ServerSet` is the one owner of that state. `ServerPool` and `ServerMonitor` write to it.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from trivet.client.inference_client import InferenceClient, PolicyStatus
from trivet.errors import ForeignPolicy, InferenceError, InferenceTimeout
from trivet.wire.events import Event, Load, ServerDown, ServerUp
from trivet.wire.versions import START_VERSION, PolicyVersion

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPolicy:
    """The policy that servers should serve."""

    version: PolicyVersion
    digest: str | None
    """None: the start model's, which is known once a server has told it."""
    directory: Path | None
    """None: the start model."""


@dataclass(slots=True, kw_only=True, eq=False)
class Server:
    """One server: its client, and what is known of it."""

    client: InferenceClient
    is_elastic: bool = False
    """It was found by `client.elastic`: it may go, and not come back."""
    is_admitted: bool = False
    """Rollouts go there."""
    is_loading: bool = False
    is_asleep: bool = False
    """True from the server's answer that it has freed its GPU memory until it is asked for a policy."""
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the server is put to sleep, and while it loads the policy with which it can be admitted."""
    num_loads: int = 0
    num_in_flight: int = 0
    """Rollouts that were sent there and did not end."""
    num_timeouts: int = 0
    """Questions in a row that it did not answer in time."""
    num_attempts: int = 0
    """Tries to admit it since it was marked unhealthy, or since the start."""
    status: PolicyStatus | None = None
    """What it answered when it was last made to serve a policy."""
    last_error: str = "was never asked"
    probed_at: float = float("-inf")
    """When the last probe that it answered began."""
    probing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def root(self) -> str:
        """The server's address, without `/v1`."""
        return self.client.base_url

    async def ensure_policy(self, policy: TargetPolicy, *, is_known_to_differ: bool = False) -> PolicyStatus:
        """Have the server serve `policy`, and prove it by its digest.

        Args:
            is_known_to_differ: skip the question which policy it serves.

        Raises:
            InferenceError: it failed, or did not answer in time.
            ForeignPolicy: it serves something else right after loading.
        """
        self.is_loading, self.is_asleep = True, False
        try:
            if not is_known_to_differ:
                status = await self.client.served_policy()
                if matches(status, policy) and not status.asleep:
                    self.status = status
                    return status
            if policy.directory is None:
                status = await self.client.reload_weights()
            else:
                status = await self.client.update_weights(policy.directory)
        finally:
            self.is_loading = False
            self.num_loads += 1
        if not matches(status, policy):
            raise ForeignPolicy(
                f"{self.root} reports policy {status.version} with digest {status.digest[:12]} after loading policy "
                f"{policy.version} with digest {(policy.digest or 'unknown')[:12]}: another run may use the same server, or it "
                "serves another start model"
            )
        self.status = status
        return status

    async def probe(self, policy: TargetPolicy, *, now: float, timeout_s: float, max_timeouts: int) -> str | None:
        """Ask an admitted server which policy it serves.

        Returns:
            Why it is unhealthy, or None.

        Raises:
            ForeignPolicy: it serves a policy that this run did not give it.
        """
        num_loads, was_loading, was_asleep = self.num_loads, self.is_loading, self.is_asleep
        try:
            status = await self.client.served_policy(timeout_s=timeout_s)
        except InferenceTimeout as exc:
            self.num_timeouts += not was_loading
            self.last_error = str(exc)
            return f"{exc}, {self.num_timeouts} times in a row" if self.num_timeouts >= max_timeouts else None
        except InferenceError as exc:
            return str(exc)
        self.num_timeouts = 0
        self.probed_at = now
        if was_asleep and self.is_asleep and not status.asleep:
            return "it does not sleep as it was told to: it was started again"
        if was_loading or self.is_loading or num_loads != self.num_loads or matches(status, policy):
            return None
        if status.version == START_VERSION:
            return f"it holds the start model, not policy {policy.version}: it was started again"
        raise ForeignPolicy(
            f"{self.root} serves policy {status.version} with digest {status.digest[:12]}, and this run had it load policy "
            f"{policy.version} with digest {(policy.digest or '')[:12]}: another run uses the same server; give each its own"
        )


def matches(status: PolicyStatus, policy: TargetPolicy) -> bool:
    """Return whether `status` is `policy`; a target without a digest matches any."""
    return status.version == policy.version and policy.digest in (None, status.digest)


class ServerSet:
    """Keeps the servers by address. A server takes rollouts while it is admitted."""

    def __init__(self, *, write_event: Callable[[Event], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write_event = write_event
        self._clock = clock
        self._servers: dict[str, Server] = {}
        self._has_admitted = asyncio.Event()
        self._empty_since = 0.0
        self._may_wake = asyncio.Event()
        self._may_wake.set()
        self._on_down: list[Callable[[str], None]] = []
        self._on_up: list[Callable[[], None]] = []
        self._target: TargetPolicy | None = None

    @property
    def target(self) -> TargetPolicy:
        """The policy that every server is to serve. It is set before the first server is admitted."""
        assert self._target is not None
        return self._target

    @target.setter
    def target(self, policy: TargetPolicy) -> None:
        self._target = policy

    @property
    def known(self) -> list[Server]:
        """Every server, admitted or not."""
        return list(self._servers.values())

    @property
    def admitted(self) -> list[Server]:
        """The servers that take rollouts."""
        return [server for server in self._servers.values() if server.is_admitted]

    @property
    def empty_s(self) -> float | None:
        """Seconds since the last admitted server was lost; None while one is admitted, and while none may be."""
        return None if self._has_admitted.is_set() or not self.may_wake else self._clock() - self._empty_since

    @property
    def may_wake(self) -> bool:
        """False while every server must leave its GPU's memory to the trainer. Then none is admitted."""
        return self._may_wake.is_set()

    @may_wake.setter
    def may_wake(self, may_wake: bool) -> None:
        """Allow or forbid the servers to take GPU memory. The time without an admitted server begins anew when they may."""
        if may_wake:
            if not self._may_wake.is_set():
                self._empty_since = self._clock()
            self._may_wake.set()
        else:
            self._may_wake.clear()

    async def wait_until_may_wake(self) -> None:
        """Wait until servers may take GPU memory. `ServerPool.ensure_policy` ends the wait."""
        await self._may_wake.wait()

    def subscribe(self, *, on_down: Callable[[str], None], on_up: Callable[[], None]) -> None:
        """Call `on_down` with the address of a server marked unhealthy, whose rollouts are lost, and `on_up` after an admission."""
        self._on_down.append(on_down)
        self._on_up.append(on_up)

    def add(self, client: InferenceClient, *, is_elastic: bool = False) -> Server:
        """Add the server that `client` reaches, not admitted.

        Args:
            is_elastic: it was found by `client.elastic`.
        """
        server = Server(client=client, is_elastic=is_elastic)
        self._servers[server.root] = server
        return server

    def remove(self, root: str) -> Server:
        """Forget the server at `root` and return it. Its client stays open."""
        return self._servers.pop(root)

    def find(self, root: str) -> Server | None:
        """Return the server at `root`; None when it was removed."""
        return self._servers.get(root)

    def admit(self, server: Server) -> None:
        """Let `server` take rollouts. It serves `target`."""
        server.is_admitted = True
        server.num_timeouts = server.num_attempts = 0
        self.record_load(server, self.target)
        self._write_event(ServerUp(server=server.root, version=self.target.version, digest=self.target.digest or ""))
        self._has_admitted.set()
        for notify in self._on_up:
            notify()

    def mark_unhealthy(self, server: Server, reason: str) -> None:
        """Stop sending rollouts to `server`, if it was admitted."""
        if not server.is_admitted:
            return
        server.is_admitted = False
        server.last_error = reason
        logger.warning("server marked unhealthy url=%s: %s", server.root, reason)
        self._write_event(ServerDown(server=server.root, reason=reason))
        if not self.admitted:
            self._has_admitted.clear()
            self._empty_since = self._clock()
        for notify in self._on_down:
            notify(server.root)

    def record_load(self, server: Server, policy: TargetPolicy) -> None:
        """Write the event that `server` serves `policy`."""
        assert server.status is not None, "a load is recorded after the server's answer"
        self._write_event(
            Load(
                version=policy.version,
                digest=policy.digest or "",
                server=server.root,
                probe_mismatch=server.status.probe_mismatch,
                probe_limit=server.status.probe_limit,
            )
        )

    async def wait_for_admitted(self) -> None:
        """Wait until a server is admitted. `ServerMonitor` bounds the wait."""
        await self._has_admitted.wait()

    def pick(self, *, num_rollouts: int) -> str | None:
        """Return the admitted server with the fewest rollouts in flight, which gets `num_rollouts` more; None without a server."""
        server = min(self.admitted, key=lambda server: server.num_in_flight, default=None)
        if server is None:
            return None
        server.num_in_flight += num_rollouts
        return server.root

    def release(self, root: str, *, num_rollouts: int) -> None:
        """Count rollouts sent to the server at `root` as ended."""
        if (server := self._servers.get(root)) is not None:
            server.num_in_flight -= num_rollouts
