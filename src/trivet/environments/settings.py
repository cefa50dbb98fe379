"""What an environment's host needs to know, as it crosses to a worker process."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from trivet.config.client import ClientConfig
from trivet.config.environment import EnvConfig


class HostSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Of one environment, the same for all its workers."""

    env_id: str
    name: str
    """In logs, metrics and requests."""
    args: dict[str, Any]
    model_name: str
    client: dict[str, Any]
    """`ClientConfig` as plain data: the names of variables that hold keys, never the keys."""
    trajectory_strategy: Literal["interleaved", "branching"] = "interleaved"
    hash_keys: list[str] = []
    """Fields that an example's hash covers; empty: hashes are not needed."""

    @property
    def client_config(self) -> ClientConfig:
        return ClientConfig.model_validate(self.client)


def host_settings(
    env: EnvConfig,
    *,
    model_name: str,
    client: ClientConfig,
    trajectory_strategy: Literal["interleaved", "branching"] = "interleaved",
    hash_keys: Sequence[str] = (),
) -> HostSettings:
    return HostSettings(
        env_id=env.id,
        name=env.label,
        args=env.args,
        model_name=model_name,
        client=client.model_dump(mode="json"),
        trajectory_strategy=trajectory_strategy,
        hash_keys=list(hash_keys),
    )
