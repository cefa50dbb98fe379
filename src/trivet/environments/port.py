"""Defines the port to environments: the orchestrator and `eval` run groups through it and never touch an environment themselves.

Adapters: `workers.pool.WorkerPool`, and `nodes.node_pools.NodePools` for several nodes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

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
