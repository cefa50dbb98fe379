"""Loads an environment of the v0 API, verifiers 0.3, with the clients of its servers."""

from collections.abc import Callable, Mapping

import verifiers as vf
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from trivet.environments.apis.load import load_failure
from trivet.environments.apis.v0.host import V0Host
from trivet.environments.apis.v0.model_client import ModelClient
from trivet.environments.apis.v0.scoring import guard_rewards
from trivet.environments.packages.installed import require_installed
from trivet.environments.workers.stages import StageBoard
from trivet.errors import EnvironmentLoadError
from trivet.process.imports import import_by_path, is_in_a_file
from trivet.process.proxies import is_direct
from trivet.wire.servers import server_root
from trivet.wire.workers import HostSettings


def load(settings: HostSettings, *, environ: Mapping[str, str], stages: StageBoard) -> V0Host:
    """Load the environment that `settings` name.

    Raises:
        EnvironmentLoadError: the package is not installed, or its load_environment raised.
    """
    env = load_environment(settings)
    guard_rewards(env)
    return V0Host(env, settings, make_client=_client_maker(settings, environ), stages=stages)


def load_environment(settings: HostSettings) -> vf.Environment:
    """Call the `load_environment` of the environment's package with its arguments.

    Raises:
        EnvironmentLoadError: the package is not installed, or its load_environment raised.
    """
    env_id = settings.env_id
    require_installed(env_id)
    try:
        if is_in_a_file(env_id):
            return _require_environment(import_by_path(env_id)(**settings.args))
        return vf.load_environment(env_id, **settings.args)
    except (Exception, SystemExit) as exc:  # an environment is the user's code: whatever it raises is reported with its name
        cause = exc.__cause__ or exc
        if isinstance(cause, AttributeError) and "load_environment" in str(cause):
            raise EnvironmentLoadError(
                f"env.id = {env_id!r} has no load_environment(**args), by which environments of the v0 API are loaded; a "
                f"taskset of the v1 API needs verifiers 0.4: install it into a virtual environment of its own with: "
                f"uv run trivet env install {env_id}"
            ) from None
        raise load_failure(settings, exc, called="load_environment") from exc


def _require_environment(made: object) -> vf.Environment:
    if not isinstance(made, vf.Environment):
        raise TypeError(f"it returned {type(made).__name__}, not a verifiers.Environment")
    return made


def _client_maker(settings: HostSettings, environ: Mapping[str, str]) -> Callable[[str], ModelClient]:
    servers = settings.servers

    def make_client(base_url: str) -> ModelClient:
        client = AsyncOpenAI(
            base_url=f"{server_root(base_url)}/v1",
            api_key=servers.api_key(base_url, environ) or "EMPTY",
            timeout=servers.timeout_s,
            default_headers=servers.headers,
            max_retries=0,
            http_client=DefaultAsyncHttpxClient(timeout=servers.timeout_s, trust_env=not is_direct(base_url, environ)),
        )
        return ModelClient(client, keeps_tokens=settings.trajectory_strategy == "interleaved" and not settings.is_plain)

    return make_client
