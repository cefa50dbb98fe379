"""Finds the servers of a run, checks the admitted servers, and admits the others once they serve the target policy.

`client.base_url` lists the servers, or `client.elastic` names a DNS name or a file where servers may come and go. An admitted
server that fails a check is marked unhealthy. A server that is not admitted is asked every second whether it is there, then to load
the target policy, with growing pauses while it fails, and admitted when it serves it. `ServerPool` calls this module. If no server
is left for too long, an error ends the run.
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

_CHECK_TIMEOUT_S = 30.0
"""Longest time for one answer: a server that loads a large policy answers late."""
_CHECK_INTERVAL_S = 5.0
"""Seconds between two checks of an admitted server. A server that was restarted is noticed after at most this long."""
_MAX_TIMEOUTS = 3
"""Checks in a row without an answer that make a server unhealthy. One is not enough, because a busy machine answers late."""
_FIRST_PAUSE_S = 1.0
"""Seconds before a server that failed to load the policy is asked again; doubled each time, up to `_MAX_PAUSE_S`."""
_MAX_PAUSE_S = 30.0
_ABSENT_INTERVAL_S = 1.0
"""Seconds between two questions whether a server is there: rollouts may wait for it, and the question costs nothing."""
_ABSENT_TIMEOUT_S = 5.0
"""Longest wait for that answer. A connection that was begun while the machine was cut off would come about late."""
_NO_SERVER_POLL_INTERVAL_S = 1.0
"""Seconds between two questions whether any server is admitted."""
_NO_SERVER_REPORT_INTERVAL_S = 60.0
"""Seconds between two log lines about a run without servers."""
_LOOKUP_RETRY_INTERVAL_S = 1.0
"""Seconds between two look-ups at the start, while no server answers."""

Resolve = Callable[[str], Awaitable[list[str]]]
"""Maps a host's name to its addresses. Raises OSError when the name cannot be resolved now."""


async def resolve(hostname: str) -> list[str]:
    """Return the addresses of `hostname`, sorted."""
    infos = await asyncio.get_running_loop().getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
    return sorted({str(socket_address[0]) for *_, socket_address in infos})


class ServerMonitor:
    """Runs one task per server, which checks it or tries to admit it. With `client.elastic` a further task looks for servers."""

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
        """The task of each server, by its address."""

    async def start(self) -> list[Server]:
        """Wait for servers at the start of a run, and return the servers that answer.

        Every server of `client.base_url` must answer; of `client.elastic` at least one.

        Raises:
            InferenceError: the wait took longer than `client.wait_for_ready_timeout`.
        """
        timeout_s = self._config.wait_for_ready_timeout
        if self._config.elastic is None:
            for url in self._config.base_url:
                await self._add(url).client.wait_ready(timeout_s)
            return list(self._pool.servers.values())
        deadline = self._clock() + timeout_s
        while True:
            await self._look_up(self._config.elastic)
            servers = list(self._pool.servers.values())
            checks = [server.client.check_health(timeout_s=_CHECK_TIMEOUT_S) for server in servers]
            results = list(zip(servers, await asyncio.gather(*checks, return_exceptions=True), strict=True))
            if ready := [server for server, error in results if error is None]:
                return ready
            for server, error in results:
                if isinstance(error, InferenceError):
                    server.last_error = str(error)
                elif error is not None:
                    raise error
            if self._clock() >= deadline:
                errors = "; ".join(server.last_error for server in servers) or "it names no address"
                raise InferenceError(f"no server of {self._config.elastic.source} was ready within {timeout_s:.0f} s: {errors}")
            await self._sleep(_LOOKUP_RETRY_INTERVAL_S)

    async def run(self) -> None:
        """Watch the servers until cancelled.

        Raises:
            InferenceError: no server was admitted for longer than `client.wait_for_ready_timeout`.
            ForeignPolicy: a server serves a policy that this run did not load there.
        """
        async with asyncio.TaskGroup() as tasks:
            for server in self._pool.servers.values():
                self._watch_in(tasks, server)
            if self._config.elastic is not None:
                tasks.create_task(self._follow(tasks, self._config.elastic), name="server-names")
            await self._require_servers(max_wait_s=self._config.wait_for_ready_timeout)

    async def is_at_fault(self, root: str) -> bool:
        """Return whether the server with address `root`, where a group failed, is removed, unhealthy or does not answer."""
        server = self._pool.servers.get(root)
        if server is None or not server.is_admitted:
            return True
        asked_at = self._clock()
        async with server.check_lock:
            if server.is_admitted and server.checked_at < asked_at:  # else another group's failure has had it checked meanwhile
                await self._check(server)
        return not server.is_admitted or server.num_timeouts > 0

    def _watch_in(self, tasks: asyncio.TaskGroup, server: Server) -> None:
        self._tasks[server.root] = tasks.create_task(self._watch(server), name=f"server-{server.root}")

    async def _follow(self, tasks: asyncio.TaskGroup, config: ElasticConfig) -> None:
        """Add and remove servers of `client.elastic` every `sync_interval`, until cancelled."""
        while True:
            await self._sleep(config.sync_interval)
            added, removed = await self._look_up(config)
            for server in added:
                logger.info("server found url=%s", server.root)
                self._watch_in(tasks, server)
            for server in removed:
                self._tasks.pop(server.root).cancel()
                self._pool.mark_unhealthy(server, f"{config.source} does not name it any more")
                await server.client.aclose()

    async def _look_up(self, config: ElasticConfig) -> tuple[list[Server], list[Server]]:
        """Make the pool's servers those of the DNS name or file. Return the added and the removed servers."""
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
        removed = [servers.pop(root) for root in list(servers) if root not in roots]
        return [self._add(root, is_elastic=True) for root in roots if root not in servers], removed

    def _add(self, url: str, *, is_elastic: bool = False) -> Server:
        server = Server(client=self._make_client(url), is_elastic=is_elastic)
        return self._pool.servers.setdefault(server.root, server)

    async def _require_servers(self, *, max_wait_s: float) -> None:
        """Warn while no server is admitted, until cancelled.

        Raises:
            InferenceError: no server was admitted for longer than `max_wait_s`.
        """
        warned_at = float("-inf")
        while True:
            await self._sleep(_NO_SERVER_POLL_INTERVAL_S)
            waited_s = self._pool.no_server_s
            if waited_s is None:
                continue
            errors = (
                "; ".join(f"{server.root}: {server.last_error}" for server in self._pool.servers.values()) or "none is known"
            )
            if waited_s > max_wait_s:
                raise InferenceError(
                    f"no inference server was left for {waited_s:.0f} s (client.wait_for_ready_timeout = {max_wait_s:g}): "
                    f"{errors}; see logs/inference.stdout"
                )
            if self._clock() - warned_at >= _NO_SERVER_REPORT_INTERVAL_S:
                warned_at = self._clock()
                logger.warning("no inference server since %.0f s, rollouts wait: %s", waited_s, errors)

    async def _watch(self, server: Server) -> None:
        """Check the server while it is admitted, and try to admit it otherwise, until cancelled."""
        while True:
            if server.is_admitted:
                await self._sleep(_CHECK_INTERVAL_S)
                async with server.check_lock:
                    if server.is_admitted:
                        await self._check(server)
                continue
            await self._pool.may_wake.wait()
            await self._sleep(await self._try_to_admit(server))

    async def _check(self, server: Server) -> None:
        problem = await server.find_problem(
            self._pool.target, now=self._clock(), timeout_s=_CHECK_TIMEOUT_S, max_timeouts=_MAX_TIMEOUTS
        )
        if problem is not None:
            self._pool.mark_unhealthy(server, problem)

    async def _try_to_admit(self, server: Server) -> float:
        """Load the target policy on a server and admit it. Return the seconds until the next attempt, if another is needed."""
        target = self._pool.target
        try:
            await server.client.check_health(timeout_s=_ABSENT_TIMEOUT_S)
        except InferenceError as exc:
            server.last_error = str(exc)
            return _ABSENT_INTERVAL_S
        try:
            async with server.change_lock:
                if not self._pool.may_wake.is_set():
                    return 0.0  # `_watch` tries again once the servers may wake
                await server.ensure_policy(target)
        except ForeignPolicy:
            raise
        except InferenceError as exc:
            server.last_error = str(exc)
            server.num_attempts += 1
            return backoff_s(server.num_attempts, first_s=_FIRST_PAUSE_S, max_s=_MAX_PAUSE_S)
        # If the target has changed meanwhile, `_watch` tries again at once; if servers must sleep now, once they may wake.
        if target is not self._pool.target:
            form = "server not admitted url=%s version=%s: a newer policy became the target while the server loaded this one"
            logger.warning(form, server.root, target.version)
        elif self._pool.may_wake.is_set():
            self._pool.admit(server)
            logger.info("server admitted url=%s version=%s", server.root, target.version)
        return 0.0
