"""Holds the state of a run's servers: which take rollouts, which policy they are to serve, how many rollouts each has in flight.

The one owner of that state. `ServerPool`, `ServerHealthMonitor` and `ServerDiscovery` write to it; it asks no server.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from trivet.client.inference_client import InferenceClient
from trivet.client.server import Server, TargetPolicy
from trivet.wire.events import Event, Load, ServerDown, ServerUp

logger = logging.getLogger(__name__)


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
        """Set the policy that every server is to serve."""
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
        """Wait until a server is admitted. `ServerHealthMonitor.require_servers` bounds the wait."""
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
