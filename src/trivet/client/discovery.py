"""Finds servers by DNS name or in a file (`client.elastic`): adds those that came, removes those that went."""

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable

from trivet.client.health import PROBE_TIMEOUT_S, ServerHealthMonitor
from trivet.client.inference_client import InferenceClient
from trivet.client.server_set import Server, ServerSet
from trivet.config.schema.inference import ElasticConfig
from trivet.errors import InferenceError
from trivet.wire.servers import server_root

logger = logging.getLogger(__name__)

_RETRY_INTERVAL_S = 1.0
"""Between two look-ups at the start, while no server answers."""

Resolve = Callable[[str], Awaitable[list[str]]]
"""Maps a host's name to its addresses. Raises OSError when the name is not known now."""


async def resolve(hostname: str) -> list[str]:
    """Return the addresses of `hostname`, sorted."""
    found = await asyncio.get_running_loop().getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
    return sorted({str(address[4][0]) for address in found})


class ServerDiscovery:
    """Keeps a `ServerSet` equal to what a DNS name resolves to, or a file lists."""

    def __init__(
        self,
        config: ElasticConfig,
        servers: ServerSet,
        *,
        make_client: Callable[[str], InferenceClient],
        resolve: Resolve = resolve,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._config = config
        self._servers = servers
        self._make_client = make_client
        self._resolve = resolve
        self._clock = clock
        self._sleep = sleep

    async def wait_ready(self, timeout_s: float) -> list[Server]:
        """Wait until a server answers; return those that do.

        Raises:
            InferenceError: none did within `timeout_s`.
        """
        deadline = self._clock() + timeout_s
        while not (ready := await self._find_ready()):
            if self._clock() >= deadline:
                errors = "; ".join(server.last_error for server in self._servers.known) or "it names no address"
                raise InferenceError(f"no server of {self._config.source} was ready within {timeout_s:.0f} s: {errors}")
            await self._sleep(_RETRY_INTERVAL_S)
        return ready

    async def follow(self, tasks: asyncio.TaskGroup, monitor: ServerHealthMonitor) -> None:
        """Look for servers every `sync_interval`, until cancelled. `monitor` watches the servers that came, in `tasks`."""
        while True:
            await self._sleep(self._config.sync_interval)
            came, gone = await self._look_up()
            for server in came:
                logger.info("server found url=%s", server.root)
                monitor.watch(tasks, server)
            for server in gone:
                monitor.unwatch(server.root)
                self._servers.mark_unhealthy(server, f"{self._config.source} does not name it any more")
                await server.client.aclose()

    async def _look_up(self) -> tuple[list[Server], list[Server]]:
        """Bring the set up to date; return the servers that came and those that went."""
        try:
            roots = await self._find_roots()
        except OSError as exc:
            logger.warning("%s cannot be looked up: %s; its servers stay", self._config.source, exc)
            return [], []
        gone = [self._servers.remove(server.root) for server in self._servers.known if server.root not in roots]
        came = [
            self._servers.add(self._make_client(root), is_elastic=True) for root in roots if self._servers.find(root) is None
        ]
        return came, gone

    async def _find_roots(self) -> list[str]:
        if self._config.servers_file is not None:
            text = await asyncio.to_thread(self._config.servers_file.read_text, "utf-8-sig")
            return [server_root(line.strip()) for line in text.splitlines() if line.strip()]
        assert self._config.hostname is not None
        addresses = await self._resolve(self._config.hostname)
        return [f"http://{f'[{address}]' if ':' in address else address}:{self._config.port}" for address in addresses]

    async def _find_ready(self) -> list[Server]:
        await self._look_up()
        known = self._servers.known
        answers = await asyncio.gather(*(_answers(server) for server in known))
        return [server for server, is_ready in zip(known, answers, strict=True) if is_ready]


async def _answers(server: Server) -> bool:
    try:
        await server.client.check_health(timeout_s=PROBE_TIMEOUT_S)
    except InferenceError as exc:
        server.last_error = str(exc)
        return False
    return True
