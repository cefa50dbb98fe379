"""Defines the port to environments: the orchestrator and `eval` run groups through it and never touch an environment themselves.

`WorkerPool` runs environments in worker processes. `LocalPool` runs them in this process, for tests and short tools.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from trivet.environments.apis.load import EnvironmentHost
from trivet.wire.events import Event
from trivet.wire.groups import EnvironmentInfo, GroupRequest, Split
from trivet.wire.rollouts import Rollout
from trivet.wire.status import WorkerStatus


class EnvironmentPool(Protocol):
    """Every environment of a run, and whatever runs its groups."""

    @property
    def infos(self) -> Mapping[str, EnvironmentInfo]:
        """Every environment's data, by its name in the configuration."""
        ...

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        """Run a group and return its scored rollouts, `request.num_rollouts` of them. Cancelling the caller cancels the group.

        Raises:
            RolloutFailed: a rollout failed on every attempt, or could not be scored; the message is the first error.
            WorkerLost: the worker died or was ended while it ran the group; the group may be run again.
        """
        ...

    async def prompt(self, env: str, *, split: Split, example_id: int) -> list[dict[str, Any]]:
        """Return the messages that an example starts with."""
        ...

    async def run(self) -> None:
        """Keep the workers alive, until cancelled.

        Raises:
            RoleFailed: a worker ended too often.
        """
        ...

    def status(self) -> Sequence[WorkerStatus]:
        """Return what each worker is doing. May be called from another thread."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Return workers' load, lag and restarts, and failed groups by environment and type of error, since the last call."""
        ...

    def report_to(self, write_event: Callable[[Event], None]) -> None:
        """Write an event with `write_event` for each environment that is loaded, and at every restart from now on."""
        ...

    async def aclose(self) -> None:
        """End every worker. May be called again."""
        ...


class LocalPool:
    """An `EnvironmentPool` over environments that its maker loaded. One that hangs holds up its caller; none is restarted."""

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
