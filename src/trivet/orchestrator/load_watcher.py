"""Adapts the limit of rollouts in flight to the servers' load.

consumes: the servers' own metrics
produces: the dispatcher's `max_in_flight`
waits for: the clock, `concurrency.interval` between two reads
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from trivet.algorithms.dispatching import CombinedLoad, next_limit
from trivet.client.server_load import ServerLoad
from trivet.client.server_pool import ServerPool
from trivet.config.schema.inference import ConcurrencyConfig
from trivet.orchestrator.dispatcher import Dispatcher

logger = logging.getLogger(__name__)


class LoadWatcher:
    """Sets the dispatcher's `max_in_flight` from the servers' load."""

    def __init__(
        self,
        config: ConcurrencyConfig,
        *,
        servers: ServerPool,
        dispatcher: Dispatcher,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._config = config
        self._servers = servers
        self._dispatcher = dispatcher
        self._sleep = sleep
        self._ceiling = dispatcher.highest_in_flight
        self._floor = min(config.min_inflight, self._ceiling)
        self._last_counts: tuple[int, int] | None = None
        """Number of servers and the sum of their preemptions at the last read; None before the first."""
        self._last_load: CombinedLoad | None = None
        if config.initial_inflight is not None:
            dispatcher.max_in_flight = max(self._floor, min(config.initial_inflight, self._ceiling))

    async def run(self) -> None:
        """Read the servers' load at each interval and adapt the limit, until cancelled."""
        while True:
            await self._sleep(self._config.interval)
            loads = await self._servers.server_loads(does_limit=self._config.adaptive)
            if loads:
                self._adapt(loads)

    def metrics(self) -> dict[str, float]:
        """Return the limit and the last load as `concurrency/*`."""
        values = {"concurrency/limit": float(self._dispatcher.max_in_flight)}
        if self._last_load is not None:
            values |= {
                "concurrency/running": float(self._last_load.num_running),
                "concurrency/waiting": float(self._last_load.num_waiting),
                "concurrency/preempted": float(self._last_load.num_preempted),
            }
        return values

    def _adapt(self, loads: Sequence[ServerLoad]) -> None:
        total = sum(load.num_preemptions for load in loads)
        # After a change in the number of servers the sums cannot be compared: then no preemption is counted.
        before = self._last_counts[1] if self._last_counts is not None and self._last_counts[0] == len(loads) else total
        self._last_load = CombinedLoad(
            num_running=sum(load.num_running for load in loads),
            num_waiting=sum(load.num_waiting for load in loads),
            num_preempted=max(0, total - before),  # a restarted server counts from 0 again, so the sum may fall
            has_capacity=any(load.has_capacity for load in loads),
        )
        self._last_counts = len(loads), total
        if not self._config.adaptive:
            return
        limit_before, in_flight = self._dispatcher.max_in_flight, self._dispatcher.rollouts_in_flight
        limit = next_limit(limit_before, self._last_load, in_flight=in_flight, floor=self._floor, ceiling=self._ceiling)
        if limit != limit_before:
            logger.debug("rollouts in flight at most=%s before=%s load=%s", limit, limit_before, self._last_load)
            self._dispatcher.max_in_flight = limit
            self._dispatcher.changed.notify()
