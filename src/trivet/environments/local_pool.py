"""Runs environments inside this process, for tests and short tools: an environment that hangs holds up its caller."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trivet.environments.apis.host import EnvironmentHost
from trivet.wire.events import Event
from trivet.wire.groups import EnvironmentInfo, GroupRequest, Split
from trivet.wire.rollouts import Rollout
from trivet.wire.status import WorkerStatus


class LocalPool:
    """An `EnvironmentPool` over environments that its maker loaded. Nothing in it can end or be restarted."""

    def __init__(self, hosts: Mapping[str, EnvironmentHost]) -> None:
        """Take over `hosts`, by their name in the configuration."""
        self._hosts = dict(hosts)

    @property
    def infos(self) -> Mapping[str, EnvironmentInfo]:
        """See `EnvironmentPool.infos`."""
        return {name: host.info for name, host in self._hosts.items()}

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        """Run the group in this process."""
        return await self._hosts[request.env].run_group(request)

    async def prompt(self, env: str, *, split: Split, example_id: int) -> list[dict[str, Any]]:
        """Return the messages that an example starts with."""
        return self._hosts[env].prompt(split=split, example_id=example_id)

    async def run(self) -> None:
        """Wait until cancelled: there is no process to keep alive."""
        await asyncio.Event().wait()

    def status(self) -> Sequence[WorkerStatus]:
        """Return nothing: there are no workers."""
        return []

    def metrics(self) -> Mapping[str, float]:
        """Return nothing: there are no workers."""
        return {}

    def report_to(self, write_event: Callable[[Event], None]) -> None:
        """Do nothing: there are no workers, of which events tell."""

    async def aclose(self) -> None:
        """Close every host. May be called again."""
        for host in self._hosts.values():
            await host.aclose()
