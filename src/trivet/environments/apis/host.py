"""Defines the port to one loaded environment. `LocalPool` holds such hosts in its own process; a worker process holds one.

Adapters: `v0.host.V0Host` and `v1.host.V1Host`.
"""

from typing import Any, Protocol

from trivet.wire.groups import EnvironmentInfo, GroupRequest, Split
from trivet.wire.rollouts import Rollout


class EnvironmentHost(Protocol):
    """A loaded environment, its data sets, and its clients of the servers."""

    @property
    def name(self) -> str:
        """The environment's name in the configuration."""
        ...

    @property
    def api(self) -> str:
        """Generation of the verifiers API that the environment is written for: `v0` or `v1`."""
        ...

    @property
    def info(self) -> EnvironmentInfo:
        """The number of its examples, and their hashes."""
        ...

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        """Run a group and return its scored rollouts.

        Raises:
            RolloutFailed: a rollout could not be completed or scored.
        """
        ...

    def prompt(self, *, split: Split, example_id: int) -> list[dict[str, Any]]:
        """Return the messages that an example starts with."""
        ...

    async def aclose(self) -> None:
        """Close the clients of all servers and whatever the environment serves. May be called again."""
        ...
