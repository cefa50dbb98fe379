"""The port to environments: the orchestrator and `eval` run groups through it and never touch an environment themselves.

`WorkerPool` runs them in worker processes, `LocalPool` in this process, for tests and short tools; both pass one contract
suite.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from trivet.wire.events import Event
from trivet.wire.groups import EnvironmentInfo, GroupRequest, Split
from trivet.wire.rollouts import Rollout
from trivet.wire.status import WorkerStatus


class EnvironmentPool(Protocol):
    """
    >>> rollouts = await pool.run_group(request)
    >>> pool.metrics()
    {'worker/reverse-text-0/pending': 0.0, …}
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

    async def run(self) -> None:
        """Keep it whole, until cancelled.

        Raises:
            RoleFailed: a worker ended too often.
        """
        ...

    def status(self) -> Sequence[WorkerStatus]:
        """What each worker is doing; may be asked from another thread."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Since the last call: workers' load, lag and restarts, and failed groups by environment and type of error."""
        ...

    def report_to(self, write_event: Callable[[Event], None]) -> None:
        """Tell of restarts from now on."""
        ...

    async def aclose(self) -> None:
        """End what was started. May be called again."""
        ...
