"""Derives from the configuration the settings of environments' hosts, sampling arguments, and the variables of worker processes."""

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from trivet.config.layout import SECRET_FILE
from trivet.config.masking import hide_values, names_secret
from trivet.config.schema.environment import EnvConfig, RequestSamplingConfig
from trivet.config.schema.inference import ClientConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.environments.packages.interpreters import find_interpreter
from trivet.wire.groups import SamplingArguments
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
    """Return the settings of the host of `env`.

    Args:
        is_plain: the servers are not trivet servers. They answer with text, without token ids and policy versions.

    Raises:
        EnvironmentLoadError: `env.venv` names a virtual environment that is not there.
    """
    return HostSettings(
        env_id=env.package,
        name=env.label,
        args=env.args,
        model_name=model_name,
        servers=client.access,
        python=find_interpreter(env),
        trajectory_strategy=trajectory_strategy,
        hash_keys=list(hash_keys),
        on_reward_error=env.on_reward_error,
        env_vars=env.env_vars,
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


def sampling_arguments(sampling: RequestSamplingConfig, *, temperature: float | None) -> SamplingArguments:
    """Return the sampling arguments of groups that start at `temperature`; None leaves the temperature to the server."""
    named = set(RequestSamplingConfig.model_fields) - {"seed", "extra_body"}
    fields = sampling.model_dump(include=named) | sampling.extra_body
    return SamplingArguments(temperature=temperature, seed=sampling.seed, fields=fields)


def worker_environment(
    environ: Mapping[str, str], *, python: str = sys.executable, settings: HostSettings | None = None
) -> dict[str, str]:
    """Return the variables of a process in which `python` imports environments: `environ` without the run's and other secrets.

    A variable whose name looks like that of a secret stays when `settings` name it, as the key of a server or in `env_vars`. If
    `python` is another interpreter than this one, the programs in its directory come first in PATH.
    """
    withheld = _withheld_variables(environ, settings)
    kept = {name: value for name, value in environ.items() if name not in withheld}
    if python != sys.executable:
        programs = Path(python).parent
        kept["VIRTUAL_ENV"] = str(programs.parent)
        kept["PATH"] = f"{programs}{os.pathsep}{environ.get('PATH', os.defpath)}"
    return kept


def _withheld_variables(environ: Iterable[str], settings: HostSettings | None) -> set[str]:
    """Return the names of the variables that `worker_environment` leaves out."""
    kept = () if settings is None else (*settings.env_vars, *settings.servers.key_variables)
    return {name for name in environ if name == SECRET_FILE or (names_secret(name) and name not in kept)}


def explain_problem(problem: str, settings: HostSettings) -> str:
    """Hide secrets in the text of a problem with an environment. If it names variables that the worker did not get, add a hint."""
    problem = hide_values(problem, settings.args)
    named = sorted(name for name in _withheld_variables(os.environ, settings) if name in problem)
    if not named:
        return problem
    return (
        f"{problem}\n  workers do not get {', '.join(named)}, whose name is that of a secret; if that is the reason, add "
        f"env_vars = {json.dumps(named)} to the environment"
    )
