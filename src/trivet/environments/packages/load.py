"""Loads verifiers environments. Whatever a user's load_environment raises becomes one error that names the environment."""

import traceback
from collections.abc import Mapping
from typing import Any

import verifiers as vf

from trivet.config.masking import hide_values, mask_table
from trivet.environments.host import EnvironmentHost
from trivet.environments.model_client import ModelClient, make_model_client
from trivet.environments.packages.installed import require_installed
from trivet.environments.reward_guard import guard_rewards
from trivet.environments.runner import GroupRunner
from trivet.environments.settings import client_config
from trivet.environments.workers.stages import StageBoard
from trivet.errors import EnvironmentLoadError
from trivet.imports import import_by_path, is_in_a_file
from trivet.shown_text import printable
from trivet.wire.workers import HostSettings

_TRACEBACK_LINES = 8


def load_host(settings: HostSettings, *, environ: Mapping[str, str], stages: StageBoard | None = None) -> EnvironmentHost:
    """Load the environment that `settings` name. Call it on the main thread: verifiers installs signal handlers.

    Args:
        environ: has the servers' keys.
        stages: records what each group is doing.

    Raises:
        EnvironmentLoadError: the package is not installed, or its load_environment raised.
    """
    client = client_config(settings)

    def make_client(base_url: str) -> ModelClient:
        return make_model_client(
            base_url,
            api_key=client.api_key(base_url, environ),
            timeout_s=client.timeout,
            headers=client.headers,
            keeps_tokens=settings.trajectory_strategy == "interleaved" and not settings.is_plain,
        )

    env = load_environment(settings.env_id, name=settings.name, args=settings.args)
    guard_rewards(env)
    runner = GroupRunner(
        env=env,
        label=settings.name,
        model_name=settings.model_name,
        trajectory_strategy=settings.trajectory_strategy,
        on_reward_error=settings.on_reward_error,
        timeout_s=settings.rollout_timeout_s,
        is_plain=settings.is_plain,
        stages=stages or StageBoard(),
    )
    return EnvironmentHost(runner, make_client=make_client, hash_keys=tuple(settings.hash_keys))


def load_environment(env_id: str, *, name: str, args: Mapping[str, Any]) -> vf.Environment:
    """Call the `load_environment` of `env_id` with `args`.

    Raises:
        EnvironmentLoadError: the package is not installed, or its load_environment raised.
    """
    require_installed(env_id)
    try:
        return (
            _require_environment(import_by_path(env_id)(**args))
            if is_in_a_file(env_id)
            else vf.load_environment(env_id, **args)
        )
    except (Exception, SystemExit) as exc:  # an environment is the user's code: whatever it raises is reported with its name
        cause = exc.__cause__ or exc
        if isinstance(cause, AttributeError) and "does not expose load_environment" in str(cause):
            raise EnvironmentLoadError(
                f"env.id = {env_id!r} has no load_environment(**args), by which environments are loaded; a taskset of the "
                "verifiers v1 API cannot be trained on: use a version of the package with a v0 environment"
            ) from None
        said = (
            f"environment {name!r}: load_environment of {env_id!r} with args {mask_table(args)} raised "
            f"{type(cause).__name__}: {cause}"
        )
        if isinstance(cause, TypeError):
            said += "; check the args against its signature"
        raise EnvironmentLoadError(printable(hide_values(said, args))) from exc


def _require_environment(made: object) -> vf.Environment:
    if not isinstance(made, vf.Environment):
        raise TypeError(f"it returned {type(made).__name__}, not a verifiers.Environment")
    return made


def traceback_tail(error: EnvironmentLoadError, args: Mapping[str, Any]) -> str:
    """Return the last lines of the traceback of the user's own code, without the secrets in its arguments."""
    cause = error.__cause__
    while cause is not None and cause.__cause__ is not None:
        cause = cause.__cause__
    if cause is None:
        return ""
    text = printable(hide_values("".join(traceback.format_exception(cause)), args))
    lines = text.rstrip().splitlines()
    return "\n  " + "\n  ".join(lines[-_TRACEBACK_LINES:])
