"""Defines the interface through which the orchestrator and `eval` run groups. They never import an environment themselves.

`workers.pool.WorkerPool` implements it, and `nodes.node_pools.NodePools` for several nodes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from trivet.wire.events import Event
from trivet.wire.groups import EnvironmentInfo, Example, GroupRequest, Split
from trivet.wire.rollouts import Rollout
from trivet.wire.status import WorkerStatus


class EnvironmentPool(Protocol):
    """Runs the groups of every environment of a run."""

    @property
    def infos(self) -> Mapping[str, EnvironmentInfo]:
        """The description of each environment's data, by the environment's name in the configuration."""
        ...

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        """Run a group and return its `request.num_rollouts` scored rollouts. Cancelling the caller cancels the group.

        Raises:
            RolloutFailed: a rollout failed for good or could not be scored, or the group ended its worker too often.
            WorkerLost: the worker ended while it ran the group; the group may be run again.
        """
        ...

    async def example(self, env: str, *, split: Split, example_id: int) -> Example:
        """Return an example of the data."""
        ...

    async def run(self) -> None:
        """Keep the workers alive, until cancelled.

        Raises:
            RoleFailed: a worker ended too often.
        """
        ...

    def status(self) -> Sequence[WorkerStatus]:
        """Return the state of each worker. May be called from another thread."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Return pending groups, event loop lag and restarts by worker, and failed groups by environment and type of error.

        Lags and failed groups are those since the last call.
        """
        ...

    def report_to(self, write_event: Callable[[Event], None]) -> None:
        """Call `write_event` now with an event for each loaded environment, and from now on at every restart of a worker."""
        ...
