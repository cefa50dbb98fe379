"""A v0 environment with a scripted model, to run groups of its first example."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import verifiers as vf

from trivet.environments.apis.v0.play import V0Host
from trivet.wire.groups import GroupRequest, SamplingArguments, ServerAccess
from trivet.wire.rollouts import Rollout
from trivet.wire.versions import GroupId
from trivet.wire.workers import HostSettings


@dataclass(frozen=True, kw_only=True)
class ToyHost:
    """Makes hosts of `env`, which ask the given client."""

    env: vf.Environment
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of `HostSettings` that are not the default."""

    def open(self, client: Any) -> V0Host:
        access = ServerAccess(base_urls=[], key_variables=[])
        settings = HostSettings(
            **{"env_id": "toy", "name": "toy", "args": {}, "model_name": "m", "servers": access, **self.settings}
        )
        return V0Host(self.env, settings, make_client=lambda _: client)

    async def play(self, client: Any, **fields: Any) -> list[Rollout]:
        """Run one group and close the client."""
        host = self.open(client)
        request = {
            "group_id": GroupId(5),
            "env": "toy",
            "example_id": 0,
            "num_rollouts": 2,
            "base_url": "http://server",
            "sampling": SamplingArguments(temperature=1.0),
            **fields,
        }
        async with host.serving():
            return await host.run_group(GroupRequest(**request))

    def run(self, client: Any, **fields: Any) -> list[Rollout]:
        return asyncio.run(self.play(client, **fields))
