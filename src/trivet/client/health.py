"""Finds the servers of a run, probes the admitted ones, and admits the others once they serve the target policy.

The servers are those of `client.base_url`, or those behind a DNS name or in a file (`client.elastic`), which may come and go. A
server that fails a probe is marked unhealthy, asked again with growing pauses, and admitted once it serves what is the target by
then. Called by `ServerPool`. A wait without any server ends in an error.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from trivet.backoff import backoff_s
from trivet.client.inference_client import InferenceClient
from trivet.client.server import Server
from trivet.config.schema.inference import ClientConfig, ElasticConfig
from trivet.errors import ForeignPolicy, InferenceError
from trivet.wire.groups import server_root

if TYPE_CHECKING:
    from trivet.client.server_pool import ServerPool

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 30.0
"""Longest time for one answer: a server that loads a large policy answers late."""
_PROBE_INTERVAL_S = 5.0
"""Between two probes of an admitted server. A server started again is found after at most this long."""
_MAX_TIMEOUTS = 3
"""Probes in a row that may go unanswered: a busy machine answers late."""
_FIRST_PAUSE_S = 1.0
"""Before the second attempt to admit a server; doubles with each, to `_MAX_PAUSE_S`."""
_MAX_PAUSE_S = 30.0
_EMPTY_POLL_INTERVAL_S = 1.0
"""How often it is looked whether a server is left."""
_EMPTY_REPORT_INTERVAL_S = 60.0
"""How often a run without servers is reported."""
_LOOKUP_RETRY_INTERVAL_S = 1.0
"""Between two look-ups at the start, while no server answers."""

Resolve = Callable[[str], Awaitable[list[str]]]
"""Maps a host's name to its addresses. Raises OSError when the name is not known now."""


async def resolve(hostname: str) -> list[str]:
    """Return the addresses of `hostname`, sorted."""
    found = await asyncio.get_running_loop().getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
    return sorted({str(address[4][0]) for address in found})


class ServerMonitor:
    """Keeps one task per server, which probes it or tries to admit it, and with `client.elastic` one that looks for servers."""

    def __init__(
        self,
        config: ClientConfig,
        pool: "ServerPool",
        *,
        make_client: Callable[[str], InferenceClient],
        resolve: Resolve = resolve,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._config = config
        self._pool = pool
        self._make_client = make_client
        self._resolve = resolve
        self._clock = clock
        self._sleep = sleep
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> list[Server]:
        """Return the servers that answer: every listed one; or once one does, those behind the name.

        Raises:
            InferenceError: that took longer than `client.wait_for_ready_timeout`.
        """
        timeout_s = self._config.wait_for_ready_timeout
        if self._config.elastic is None:
            for url in self._config.base_url:
                await self._add(url).client.wait_ready(timeout_s)
            return list(self._pool.servers.values())
        deadline = self._clock() + timeout_s
        while True:
            await self._look_up(self._config.elastic)
            known = list(self._pool.servers.values())
            questions = [server.client.check_health(timeout_s=_PROBE_TIMEOUT_S) for server in known]
            answers = list(zip(known, await asyncio.gather(*questions, return_exceptions=True), strict=True))
            if ready := [server for server, error in answers if error is None]:
                return ready
            for server, error in answers:
                if isinstance(error, InferenceError):
                    server.last_error = str(error)
                elif error is not None:
                    raise error
            if self._clock() >= deadline:
                errors = "; ".join(server.last_error for server in known) or "it names no address"
                raise InferenceError(f"no server of {self._config.elastic.source} was ready within {timeout_s:.0f} s: {errors}")
            await self._sleep(_LOOKUP_RETRY_INTERVAL_S)

    async def run(self) -> None:
        """Watch the servers until cancelled.

        Raises:
            InferenceError: no server was left for longer than `client.wait_for_ready_timeout`.
            ForeignPolicy: a server serves what this run did not give it.
        """
        async with asyncio.TaskGroup() as tasks:
            for server in self._pool.servers.values():
                self._watch_in(tasks, server)
            if self._config.elastic is not None:
                tasks.create_task(self._follow(tasks, self._config.elastic), name="server-names")
            await self._require_servers(max_empty_s=self._config.wait_for_ready_timeout)

    async def is_at_fault(self, root: str) -> bool:
        """Return whether the server at `root`, where a group failed, does not answer as it should."""
        server = self._pool.servers.get(root)
        if server is None or not server.is_admitted:
            return True
        asked_at = self._clock()
        async with server.probing:
            if server.is_admitted and server.probed_at < asked_at:
                await self._probe(server)
        return not server.is_admitted or server.num_timeouts > 0

    def _watch_in(self, tasks: asyncio.TaskGroup, server: Server) -> None:
        self._tasks[server.root] = tasks.create_task(self._watch(server), name=f"server-{server.root}")

    async def _follow(self, tasks: asyncio.TaskGroup, config: ElasticConfig) -> None:
        """Add and remove servers every `sync_interval`, until cancelled."""
        while True:
            await self._sleep(config.sync_interval)
            came, gone = await self._look_up(config)
            for server in came:
                logger.info("server found url=%s", server.root)
                self._watch_in(tasks, server)
            for server in gone:
                self._tasks.pop(server.root).cancel()
                self._pool.mark_unhealthy(server, f"{config.source} does not name it any more")
                await server.client.aclose()

    async def _look_up(self, config: ElasticConfig) -> tuple[list[Server], list[Server]]:
        """Bring the set up to date; return the servers that came and those that went."""
        try:
            if config.servers_file is not None:
                text = await asyncio.to_thread(config.servers_file.read_text, "utf-8-sig")
                roots = [server_root(line.strip()) for line in text.splitlines() if line.strip()]
            else:
                assert config.hostname is not None
                hosts = [f"[{address}]" if ":" in address else address for address in await self._resolve(config.hostname)]
                roots = [f"http://{host}:{config.port}" for host in hosts]
        except OSError as exc:
            logger.warning("%s cannot be looked up: %s; its servers stay", config.source, exc)
            return [], []
        servers = self._pool.servers
        gone = [servers.pop(root) for root in list(servers) if root not in roots]
        return [self._add(root, is_elastic=True) for root in roots if root not in servers], gone

    def _add(self, url: str, *, is_elastic: bool = False) -> Server:
        server = Server(client=self._make_client(url), is_elastic=is_elastic)
        return self._pool.servers.setdefault(server.root, server)

    async def _require_servers(self, *, max_empty_s: float) -> None:
        """Report a time without any admitted server, until cancelled.

        Raises:
            InferenceError: no server was admitted for longer than `max_empty_s`.
        """
        warned_at = float("-inf")
        while True:
            await self._sleep(_EMPTY_POLL_INTERVAL_S)
            empty_s = self._pool.empty_s
            if empty_s is None:
                continue
            errors = (
                "; ".join(f"{server.root}: {server.last_error}" for server in self._pool.servers.values()) or "none is known"
            )
            if empty_s > max_empty_s:
                raise InferenceError(
                    f"no inference server was left for {empty_s:.0f} s (client.wait_for_ready_timeout = {max_empty_s:g}): "
                    f"{errors}; see logs/inference.stdout"
                )
            if self._clock() - warned_at >= _EMPTY_REPORT_INTERVAL_S:
                warned_at = self._clock()
                logger.warning("no inference server since %.0f s, rollouts wait: %s", empty_s, errors)

    async def _watch(self, server: Server) -> None:
        while True:
            if server.is_admitted:
                await self._sleep(_PROBE_INTERVAL_S)
                async with server.probing:
                    if server.is_admitted:
                        await self._probe(server)
                continue
            await self._pool.may_wake.wait()
            if not await self._try_to_admit(server):
                server.num_attempts += 1
                await self._sleep(backoff_s(server.num_attempts, first_s=_FIRST_PAUSE_S, max_s=_MAX_PAUSE_S))

    async def _probe(self, server: Server) -> None:
        reason = await server.probe(
            self._pool.target, now=self._clock(), timeout_s=_PROBE_TIMEOUT_S, max_timeouts=_MAX_TIMEOUTS
        )
        if reason is not None:
            self._pool.mark_unhealthy(server, reason)

    async def _try_to_admit(self, server: Server) -> bool:
        target = self._pool.target
        try:
            await server.client.check_health(timeout_s=_PROBE_TIMEOUT_S)
            async with server.changing:
                if not self._pool.may_wake.is_set():
                    return True  # the server is asked again when the servers may wake
                await server.ensure_policy(target)
        except ForeignPolicy:
            raise
        except InferenceError as exc:
            server.last_error = str(exc)
            return False
        # Otherwise the server is asked again: at once for the new target, or when the servers may wake.
        if target is self._pool.target and self._pool.may_wake.is_set():
            self._pool.admit(server)
            logger.info("server admitted url=%s version=%s", server.root, target.version)
        return True
