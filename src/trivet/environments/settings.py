"""Derives the settings of an environment's host from the configuration, and the variables that its process gets."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from trivet.config.sections.client import ClientConfig
from trivet.config.sections.environment import CREDENTIALS, EnvConfig
from trivet.config.sections.orchestrator import OrchestratorConfig
from trivet.secret import SECRET_FILE
from trivet.wire.workers import HostSettings


def host_settings(
    env: EnvConfig,
    *,
    model_name: str,
    client: ClientConfig,
    trajectory_strategy: Literal["interleaved", "branching"] = "interleaved",
    hash_keys: Sequence[str] = (),
    rollout_timeout_s: float | None = None,
    log_level: str = "info",
    is_plain: bool = False,
) -> HostSettings:
    """Return what the host of `env` needs to know.

    Args:
        is_plain: the servers are not trivet servers and answer text alone.
    """
    return HostSettings(
        env_id=env.id,
        name=env.label,
        args=env.args,
        model_name=model_name,
        servers=client.access,
        trajectory_strategy=trajectory_strategy,
        hash_keys=list(hash_keys),
        on_reward_error=env.on_reward_error,
        keep_variables=list(env.keep_variables),
        rollout_timeout_s=rollout_timeout_s,
        log_level=log_level,
        is_plain=is_plain,
    )


def run_settings(config: OrchestratorConfig) -> dict[str, HostSettings]:
    """Return the settings of every environment of a run, by the name of its workers."""
    return {
        name: msgspec.structs.replace(
            host_settings(
                env,
                model_name=config.model.name,
                client=config.client,
                trajectory_strategy=config.trajectory_strategy,
                hash_keys=config.buffer.hash_keys,
                rollout_timeout_s=config.rollout_timeout_s,
                log_level=config.log.level,
            ),
            name=name,
        )
        for name, env in config.environments.items()
    }


def worker_environment(environ: Mapping[str, str], *, settings: Iterable[HostSettings] = ()) -> dict[str, str]:
    """Return `environ` for a process that imports environments, without the run's secret and credentials.

    Credentials stay that one of `settings` keeps or names as the key of a server.
    """
    kept: set[str] = set()
    for each in settings:
        kept |= {*each.keep_variables, *each.servers.key_variables}
    withheld = {SECRET_FILE, *(set(CREDENTIALS) - kept)}
    return {name: value for name, value in environ.items() if name not in withheld}
