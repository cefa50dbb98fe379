"""The inference servers of a run: which of them take rollouts, and what they hold.

A server takes rollouts once it is admitted: it answers and holds the wanted policy, proven by its digest. One that fails is set
aside, asked again with growing pauses, and admitted once it holds what is wanted by then. The policy watcher says what is
wanted, the dispatcher picks servers and reports failures; nobody else asks a server to load.

Consumes answers of the servers, and addresses behind a DNS name. Produces Load, ServerUp and ServerDown events. Waits between
probes; a wait without any server ends in an error after `client.wait_for_ready_timeout`.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from trivet.backoff import backoff_s
from trivet.client.inference_client import InferenceClient
from trivet.client.load import ServerLoad
from trivet.client.names import Resolve, resolve, server_roots
from trivet.client.server import Server, TargetPolicy
from trivet.config.sections.client import ClientConfig
from trivet.errors import ForeignPolicy, InferenceError, PolicyRefused
from trivet.wire.events import Event, Load, ServerDown, ServerUp
from trivet.wire.versions import START_VERSION

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTiming:
    probe_interval_s: float = 5.0
    """Between two questions to an admitted server."""
    probe_timeout_s: float = 30.0
    max_timeouts: int = 3
    """Probes in a row that may go unanswered: a busy machine answers late."""
    first_pause_s: float = 1.0
    """Before the second attempt to admit a server; doubles with each."""
    max_pause_s: float = 30.0
    warn_interval_s: float = 60.0
    """How often a run without servers is reported."""


class ServerPool:
    """
    >>> pool = ServerPool(config.client, make_client=make_client, write_event=telemetry.write_event)
    >>> await pool.start()
    >>> await pool.ensure_policy_on_all(TargetPolicy(version=START_VERSION, digest=None, directory=None), reset=True)
    >>> running = tasks.create_task(pool.run())
    >>> root = pool.pick(num_rollouts=16)
    >>> await pool.aclose()
    """

    def __init__(
        self,
        config: ClientConfig,
        *,
        make_client: Callable[[str], InferenceClient],
        write_event: Callable[[Event], None],
        ask_name: Resolve = resolve,
        timing: PoolTiming | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """
        Args:
            make_client: from a server's address to a client of its own.
            ask_name: looks up `client.elastic.hostname`.
        """
        self._config = config
        self._make_client = make_client
        self._write_event = write_event
        self._ask_name = ask_name
        self._timing = timing or PoolTiming()
        self._clock = clock
        self._sleep = sleep
        self._servers: dict[str, Server] = {}
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._wanted: TargetPolicy | None = None
        self._has_server = asyncio.Event()
        self._empty_since = 0.0
        self.on_down: Callable[[str], None] = lambda root: None
        """Called when a server is set aside: what it was generating is lost."""
        self.on_up: Callable[[], None] = lambda: None
        """Called when a server is admitted."""

    @property
    def roots(self) -> list[str]:
        """The servers that take rollouts."""
        return [server.root for server in self._servers.values() if server.is_admitted]

    async def start(self) -> None:
        """Returns once every listed server answers; with a DNS name, once one behind it does.

        Raises:
            InferenceError: that took longer than `client.wait_for_ready_timeout`.
        """
        timeout_s = self._config.wait_for_ready_timeout
        if self._config.elastic is None:
            for url in self._config.base_url:
                server = self._add(url)
                await server.client.wait_ready(timeout_s)
                logger.info("inference ready url=%s", server.root)
            return
        deadline = self._clock() + timeout_s
        while not (ready := await self._find_ready()):
            if self._clock() >= deadline:
                errors = "; ".join(server.last_error for server in self._servers.values()) or "the name has no address"
                raise InferenceError(
                    f"no server behind client.elastic.hostname = {self._config.elastic.hostname!r} was ready within "
                    f"{timeout_s:.0f} s: {errors}"
                )
            await self._sleep(self._timing.first_pause_s)
        logger.info("inference ready urls=%s", ", ".join(ready))

    async def ensure_policy_on_all(self, policy: TargetPolicy, *, reset: bool = True) -> TargetPolicy:
        """Have every server hold `policy` and admit it: before the first rollout.

        Args:
            reset: of the start model: have servers that hold something else go back to it; else they are refused.

        Returns:
            `policy` with its digest.

        Raises:
            InferenceError: a listed server failed, or all behind a DNS name did; or their start models differ.
        """
        if policy.directory is None and not reset:
            await self._require_start_model()
        errors: list[InferenceError] = []
        for server in self._servers.values():
            try:
                status = await server.ensure_policy(policy)
            except InferenceError as exc:
                server.last_error = str(exc)
                errors.append(exc)
            else:
                policy = self._wanted = replace(policy, digest=status.digest)
                self._admit(server)
        if errors and (self._config.elastic is None or not self.roots):
            raise errors[0]
        return policy

    async def ensure_policy(self, policy: TargetPolicy) -> None:
        """Have the admitted servers hold `policy`. One that fails is set aside; returns once at least one server holds it.

        Raises:
            PolicyRefused: every server says that the weights directory is not whole.
            ForeignPolicy: a server reports something else after loading it.
        """
        self._wanted = policy
        serving = [server for server in self._servers.values() if server.is_admitted]
        errors = await asyncio.gather(*(self._load_one(server, policy) for server in serving))
        refused = [error for error in errors if isinstance(error, PolicyRefused)]
        if serving and len(refused) == len(serving):
            raise refused[0]
        await self._has_server.wait()

    async def run(self) -> None:
        """Watch the servers until cancelled.

        Raises:
            InferenceError: no server was left for longer than `client.wait_for_ready_timeout`.
            ForeignPolicy: a server holds what this run did not give it.
        """
        async with asyncio.TaskGroup() as tasks:
            for server in self._servers.values():
                self._watch(tasks, server)
            if self._config.elastic is not None:
                tasks.create_task(self._follow_name(tasks), name="server-names")
            await self._guard_emptiness()

    def pick(self, *, num_rollouts: int) -> str | None:
        """The admitted server with the fewest rollouts in flight, which gets `num_rollouts` more; None when there is none."""
        serving = [server for server in self._servers.values() if server.is_admitted]
        if not serving:
            return None
        server = min(serving, key=lambda server: server.num_in_flight)
        server.num_in_flight += num_rollouts
        return server.root

    def release(self, root: str, *, num_rollouts: int) -> None:
        """Rollouts sent to a server have ended."""
        if (server := self._servers.get(root)) is not None:
            server.num_in_flight -= num_rollouts

    async def is_at_fault(self, root: str) -> bool:
        """After a group failed on the server at `root`: whether the server does not answer as it should."""
        server = self._servers.get(root)
        if server is None or not server.is_admitted:
            return True
        asked_at = self._clock()
        async with server.probing:
            if server.is_admitted and server.probed_at < asked_at:
                await self._probe(server)
        return not server.is_admitted or server.num_timeouts > 0

    async def server_loads(self) -> list[ServerLoad]:
        """How busy the admitted servers are; those that do not say are left out."""
        serving = [server for server in self._servers.values() if server.is_admitted]
        answers = await asyncio.gather(*(self._load_of(server) for server in serving))
        return [load for load in answers if load is not None]

    async def aclose(self) -> None:
        """May be called again."""
        while self._servers:
            _, server = self._servers.popitem()
            await server.client.aclose()

    async def _load_of(self, server: Server) -> ServerLoad | None:
        try:
            return await server.client.server_load()
        except InferenceError as exc:
            logger.debug("no load of %s: %s", server.root, exc)
            return None

    def _add(self, url: str) -> Server:
        server = Server(client=self._make_client(url))
        self._servers[server.root] = server
        return server

    async def _require_start_model(self) -> None:
        for server in self._servers.values():
            status = await server.client.served_policy()
            if status.version != START_VERSION:
                raise InferenceError(
                    f"{server.root} holds policy {status.version} and the run starts from the base model; set "
                    "orchestrator.reload_weights_on_start = true"
                )

    async def _load_one(self, server: Server, policy: TargetPolicy) -> InferenceError | None:
        try:
            await server.ensure_policy(policy, is_known_to_differ=True)
        except ForeignPolicy:
            raise
        except InferenceError as exc:
            self._set_aside(server, f"it did not load policy {policy.version}: {exc}")
            return exc
        if server.is_admitted:
            self._write_load(server, policy)
        return None

    def _write_load(self, server: Server, policy: TargetPolicy) -> None:
        self._write_event(Load(version=policy.version, digest=policy.digest or "", server=server.root))

    def _admit(self, server: Server) -> None:
        wanted = self._wanted
        assert wanted is not None
        server.is_admitted = True
        server.num_timeouts = server.num_attempts = 0
        self._write_load(server, wanted)
        self._write_event(ServerUp(server=server.root, version=wanted.version, digest=wanted.digest or ""))
        self._has_server.set()
        self.on_up()

    def _set_aside(self, server: Server, reason: str) -> None:
        if not server.is_admitted:
            return
        server.is_admitted = False
        server.last_error = reason
        logger.warning("server set aside url=%s: %s", server.root, reason)
        self._write_event(ServerDown(server=server.root, reason=reason))
        if not self.roots:
            self._has_server.clear()
            self._empty_since = self._clock()
        self.on_down(server.root)

    def _watch(self, tasks: asyncio.TaskGroup, server: Server) -> None:
        self._watching[server.root] = tasks.create_task(self._keep(server), name=f"server-{server.root}")

    async def _keep(self, server: Server) -> None:
        """Probe `server` while it is admitted, else try to admit it."""
        timing = self._timing
        while True:
            if server.is_admitted:
                await self._sleep(timing.probe_interval_s)
                async with server.probing:
                    if server.is_admitted:
                        await self._probe(server)
            elif not await self._try_to_admit(server):
                server.num_attempts += 1
                await self._sleep(backoff_s(server.num_attempts, first_s=timing.first_pause_s, max_s=timing.max_pause_s))

    async def _probe(self, server: Server) -> None:
        wanted = self._wanted
        assert wanted is not None
        timing = self._timing
        reason = await server.probe(
            wanted, now=self._clock(), timeout_s=timing.probe_timeout_s, max_timeouts=timing.max_timeouts
        )
        if reason is not None:
            self._set_aside(server, reason)

    async def _try_to_admit(self, server: Server) -> bool:
        wanted = self._wanted
        assert wanted is not None
        try:
            await server.client.check_health(timeout_s=self._timing.probe_timeout_s)
            await server.ensure_policy(wanted)
        except ForeignPolicy:
            raise
        except InferenceError as exc:
            server.last_error = str(exc)
            return False
        if wanted is self._wanted:  # else it is asked again at once, for what is wanted now
            self._admit(server)
            logger.info("server admitted url=%s version=%s", server.root, wanted.version)
        return True

    async def _guard_emptiness(self) -> None:
        timing, limit_s = self._timing, self._config.wait_for_ready_timeout
        warned_at = float("-inf")
        while True:
            await self._sleep(timing.first_pause_s)
            if self._has_server.is_set():
                continue
            errors = "; ".join(f"{server.root}: {server.last_error}" for server in self._servers.values()) or "none is known"
            waited_s = self._clock() - self._empty_since
            if waited_s > limit_s:
                raise InferenceError(
                    f"no inference server was left for {waited_s:.0f} s (client.wait_for_ready_timeout = {limit_s:g}): "
                    f"{errors}; see logs/inference.stdout"
                )
            if self._clock() - warned_at >= timing.warn_interval_s:
                warned_at = self._clock()
                logger.warning("no inference server since %.0f s, rollouts wait: %s", waited_s, errors)

    async def _find_ready(self) -> list[str]:
        """At start: the servers behind the name that answer."""
        await self._look_up()
        ready: list[str] = []
        for server in self._servers.values():
            try:
                await server.client.check_health(timeout_s=self._timing.probe_timeout_s)
            except InferenceError as exc:
                server.last_error = str(exc)
            else:
                ready.append(server.root)
        return ready

    async def _look_up(self) -> tuple[list[Server], list[Server]]:
        """Bring the list of servers up to date; those that came and those that went."""
        elastic = self._config.elastic
        assert elastic is not None
        try:
            roots = await server_roots(elastic, self._ask_name)
        except OSError as exc:
            logger.warning("client.elastic.hostname = %r cannot be looked up: %s; its servers stay", elastic.hostname, exc)
            return [], []
        gone = [self._servers.pop(root) for root in list(self._servers) if root not in roots]
        return [self._add(root) for root in roots if root not in self._servers], gone

    async def _follow_name(self, tasks: asyncio.TaskGroup) -> None:
        elastic = self._config.elastic
        assert elastic is not None
        while True:
            await self._sleep(elastic.sync_interval)
            came, gone = await self._look_up()
            for server in came:
                logger.info("server found url=%s", server.root)
                self._watch(tasks, server)
            for server in gone:
                self._watching.pop(server.root).cancel()
                self._set_aside(server, f"{elastic.hostname} does not name it any more")
                await server.client.aclose()
