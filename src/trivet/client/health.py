"""Watches the servers of a run: probes the admitted ones, admits the others once they serve the target policy.

A server that fails a probe is marked unhealthy, asked again with growing pauses, and admitted once it serves what is the target
by then. Called by `ServerPool`. A wait without any server ends in an error.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from trivet.backoff import backoff_s
from trivet.client.server_set import Server, ServerSet
from trivet.errors import ForeignPolicy, InferenceError

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 30.0
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


class ServerHealthMonitor:
    """Keeps one task per server, which probes it or tries to admit it."""

    def __init__(
        self,
        servers: ServerSet,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._servers = servers
        self._clock = clock
        self._sleep = sleep
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def watch(self, tasks: asyncio.TaskGroup, server: Server) -> None:
        """Probe or admit `server` in a task of `tasks`, until cancelled."""
        self._tasks[server.root] = tasks.create_task(self._watch(server), name=f"server-{server.root}")

    def unwatch(self, root: str) -> None:
        """Stop probing the server at `root`."""
        self._tasks.pop(root).cancel()

    async def is_at_fault(self, root: str) -> bool:
        """Return whether the server at `root`, where a group failed, does not answer as it should."""
        server = self._servers.find(root)
        if server is None or not server.is_admitted:
            return True
        asked_at = self._clock()
        async with server.probing:
            if server.is_admitted and server.probed_at < asked_at:
                await self._probe(server)
        return not server.is_admitted or server.num_timeouts > 0

    async def require_servers(self, *, max_empty_s: float) -> None:
        """Report a time without any admitted server, until cancelled.

        Raises:
            InferenceError: no server was admitted for longer than `max_empty_s`.
        """
        warned_at = float("-inf")
        while True:
            await self._sleep(_EMPTY_POLL_INTERVAL_S)
            empty_s = self._servers.empty_s
            if empty_s is None:
                continue
            errors = "; ".join(f"{server.root}: {server.last_error}" for server in self._servers.known) or "none is known"
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
            await self._servers.wait_until_may_wake()
            if not await self._try_to_admit(server):
                server.num_attempts += 1
                await self._sleep(backoff_s(server.num_attempts, first_s=_FIRST_PAUSE_S, max_s=_MAX_PAUSE_S))

    async def _probe(self, server: Server) -> None:
        reason = await server.probe(
            self._servers.target, now=self._clock(), timeout_s=PROBE_TIMEOUT_S, max_timeouts=_MAX_TIMEOUTS
        )
        if reason is not None:
            self._servers.mark_unhealthy(server, reason)

    async def _try_to_admit(self, server: Server) -> bool:
        target = self._servers.target
        try:
            await server.client.check_health(timeout_s=PROBE_TIMEOUT_S)
            async with server.changing:
                if not self._servers.may_wake:
                    return True  # the server is asked again when the servers may wake
                await server.ensure_policy(target)
        except ForeignPolicy:
            raise
        except InferenceError as exc:
            server.last_error = str(exc)
            return False
        # Otherwise the server is asked again: at once for the new target, or when the servers may wake.
        if target is self._servers.target and self._servers.may_wake:
            self._servers.admit(server)
            logger.info("server admitted url=%s version=%s", server.root, target.version)
        return True
