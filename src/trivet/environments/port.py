"""The port to environments: the orchestrator and `eval` run groups through it and never touch an environment themselves.

`WorkerPool` runs them in worker processes, `LocalPool` in this process, for tests and short tools; both pass one contract
suite.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from trivet.wire.groups import EnvironmentInfo, GroupRequest, Split
from trivet.wire.rollouts import Rollout


class EnvironmentPool(Protocol):
    """
    >>> pool = await open_worker_pool(...)
    >>> rollouts = await pool.run_group(request)
    >>> await pool.aclose()
    """

    @property
    def infos(self) -> Mapping[str, EnvironmentInfo]:
        """Every environment, by its name in the configuration."""
        ...

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        """The group's scored rollouts, `request.num_rollouts` of them. Cancelling the caller cancels the group.

        Raises:
            RolloutFailed: a rollout failed on every attempt, or could not be scored; the message is the first error.
            WorkerLost: the worker died or was ended while it ran the group; the group may be run again.
        """
        ...

    async def prompt(self, env: str, *, split: Split, example_id: int) -> list[dict[str, Any]]:
        """The messages that an example starts with."""
        ...

    async def aclose(self) -> None:
        """End what was started. May be called again."""
        ...
