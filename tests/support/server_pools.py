"""Runs a ServerPool over simulated servers, in virtual time."""

import asyncio
import contextlib
import inspect
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from support.simulated_run import SimulatedServer
from support.virtual_time import run_virtually
from trivet.client.server import TargetPolicy
from trivet.client.server_pool import ServerPool
from trivet.config.layout import RunLayout
from trivet.config.schema.inference import ClientConfig, ElasticConfig
from trivet.weights.manifest import read_manifest
from trivet.wire.events import Event
from trivet.wire.versions import PolicyVersion

START = TargetPolicy(version=PolicyVersion(0), digest=None, directory=None)
A, B = "http://a", "http://b"


def policy(layout: RunLayout, version: int) -> TargetPolicy:
    directory = layout.weights_step(version)
    return TargetPolicy(version=PolicyVersion(version), digest=read_manifest(directory).digest, directory=directory)


class Site:
    def __init__(self, *roots: str, names: Sequence[list[str] | OSError] = (), ready_s: float = 600.0) -> None:
        self.servers = {root: SimulatedServer(root, random.Random(0), load_s=1.0) for root in roots}
        self.running: asyncio.Task[None]
        """Watches the servers of a pool that was started."""
        self.events: list[Event] = []
        self.lost: list[str] = []
        self._names = list(names)
        config = ClientConfig(
            base_url=list(roots),
            elastic=ElasticConfig(hostname="inference.local", port=80) if names else None,
            wait_for_ready_timeout=ready_s,
        )
        self.pool = ServerPool(
            config,
            make_client=lambda url: self.servers[url],  # type: ignore[arg-type, return-value]
            write_event=self.events.append,
            resolve=self._resolve,
            clock=asyncio.get_running_loop().time,
        )
        self.pool.subscribe(on_down=self.lost.append, on_up=lambda: None)

    async def _resolve(self, hostname: str) -> list[str]:
        answer = self._names.pop(0) if len(self._names) > 1 else self._names[0]
        if isinstance(answer, OSError):
            raise answer
        return answer

    def of(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]


@contextlib.asynccontextmanager
async def started(site: Site) -> AsyncIterator[asyncio.Task[None]]:
    await site.pool.start()
    await site.pool.ensure_policy_on_all(START)
    running = asyncio.create_task(site.pool.run())
    try:
        yield running
    finally:
        running.cancel()
        await site.pool.aclose()


def simulated(*roots: str, limit_s: float, **options: Any) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Make a test of an asynchronous function of a started site and the fixtures that it names; it runs in virtual time."""

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        def run(**fixtures: Any) -> None:
            async def scenario() -> None:
                site = Site(*roots, **options)
                async with started(site) as site.running:
                    await test(site, **fixtures)

            run_virtually(scenario(), limit_s=limit_s)

        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        _, *fixtures = inspect.signature(test).parameters.values()
        run.__signature__ = inspect.Signature(fixtures)  # type: ignore[attr-defined]  # by which pytest finds the fixtures
        return run

    return decorate
