"""Chooses the server that a group of an evaluation runs on, and another one if that server or its worker is lost.

Called by the orchestrator's evaluations and by the command `eval`. It waits while no server takes rollouts; the pool of servers
ends that wait with an error when it lasts too long.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from trivet.errors import RolloutFailed, WorkerLost
from trivet.wire.groups import GroupRequest
from trivet.wire.rollouts import Rollout
from trivet.wire.versions import PolicyVersion

_POLL_INTERVAL_S = 1.0
_MAX_ATTEMPTS = 3
"""Attempts at a group whose server or worker is lost each time."""

RunOnServer = Callable[[GroupRequest], Awaitable[list[Rollout]]]
"""Runs a group on the server that its request names."""


class PlacementServers(Protocol):
    """Chooses the server of a group. Adapters: `client.server_pool.ServerPool`, `evaluation.servers.PlainServers`."""

    def pick(self, *, num_rollouts: int) -> str | None:
        """Return the server with the fewest rollouts and count these there; None while no server takes rollouts."""
        ...

    def release(self, root: str, *, num_rollouts: int) -> None:
        """Stop counting rollouts that `pick` counted."""
        ...

    async def is_at_fault(self, root: str) -> bool:
        """Return whether the server, and not the environment, made a group fail."""
        ...


async def run_on_least_loaded(
    request: GroupRequest, *, run_group: RunOnServer, servers: PlacementServers, version: PolicyVersion | None
) -> list[Rollout]:
    """Run on the least loaded server. If that server or worker is lost, retry on another.

    Args:
        request: its server is replaced.
        version: the policy that must have sampled every token: a restarted server serves another. None: the servers do not say.

    Raises:
        RolloutFailed: the group failed on a server that answers, or its worker was lost too often.
        WorkerLost: every attempt lost its server or its worker.
    """
    last_error: Exception | None = None
    for _ in range(_MAX_ATTEMPTS):
        server = await _find_server(servers, request.num_rollouts)
        try:
            rollouts = await run_group(msgspec.structs.replace(request, base_url=server))
            if version is None or not _is_other(rollouts, version):
                return rollouts
            last_error = WorkerLost(f"the server {server} answered with another policy than {version}: it was restarted")
        except WorkerLost as exc:
            last_error = exc
        except RolloutFailed as exc:
            if not await servers.is_at_fault(server):
                raise
            last_error = exc
        finally:
            servers.release(server, num_rollouts=request.num_rollouts)
    assert last_error is not None
    raise last_error


async def _find_server(servers: PlacementServers, num_rollouts: int) -> str:
    while True:
        server = servers.pick(num_rollouts=num_rollouts)
        if server is not None:
            return server
        await asyncio.sleep(_POLL_INTERVAL_S)


def _is_other(rollouts: Sequence[Rollout], version: PolicyVersion) -> bool:
    return any(run.version != version for rollout in rollouts for sample in rollout.samples for run in sample.versions)
