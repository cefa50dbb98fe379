"""The port to environments inside this process, for tests and short tools: a hanging environment holds up its caller."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trivet.environments.host import EnvironmentHost
from trivet.wire.events import Event
from trivet.wire.groups import EnvironmentInfo, GroupRequest, Split
from trivet.wire.rollouts import Rollout
from trivet.wire.status import WorkerStatus


class LocalPool:
    """An `EnvironmentPool` over environments loaded by its maker."""

    def __init__(self, hosts: Mapping[str, EnvironmentHost]) -> None:
        """
        Args:
            hosts: by name in the configuration.
        """
        self._hosts = dict(hosts)

    @property
    def infos(self) -> Mapping[str, EnvironmentInfo]:
        return {name: host.info for name, host in self._hosts.items()}

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        return await self._hosts[request.env].run_group(request)

    async def prompt(self, env: str, *, split: Split, example_id: int) -> list[dict[str, Any]]:
        return self._hosts[env].prompt(split=split, example_id=example_id)

    async def run(self) -> None:
        await asyncio.Event().wait()  # nothing can end without its caller

    def status(self) -> Sequence[WorkerStatus]:
        return []

    def metrics(self) -> Mapping[str, float]:
        return {}

    def report_to(self, write_event: Callable[[Event], None]) -> None:
        """Nothing is ever restarted."""

    async def aclose(self) -> None:
        for host in self._hosts.values():
            await host.aclose()
