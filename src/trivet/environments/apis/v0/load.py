"""Loads an environment of the v0 API, verifiers 0.3, with the clients of its servers."""

from collections.abc import Mapping

import verifiers as vf
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from trivet.environments.apis.groups import StageBoard
from trivet.environments.apis.load import LOADER, make_load_error, require_installed
from trivet.environments.apis.v0.play import ModelClient, V0Host
from trivet.environments.apis.v0.score import guard_rewards
from trivet.errors import EnvironmentLoadError
from trivet.process.imports import file_of, import_by_path
from trivet.process.proxies import is_direct
from trivet.wire.groups import server_root
from trivet.wire.workers import HostSettings


def load(settings: HostSettings, *, environ: Mapping[str, str], stages: StageBoard) -> V0Host:
    """Load the environment that `settings` name; raises as `load_environment`."""
    env = load_environment(settings)
    guard_rewards(env)
    return V0Host(env, settings, make_client=lambda url: make_client(settings, environ, url), stages=stages)


def make_client(settings: HostSettings, environ: Mapping[str, str], base_url: str) -> ModelClient:
    """Return the client of the server at `base_url`. `is_direct` decides whether it uses the proxies that `environ` names."""
    servers = settings.servers
    client = AsyncOpenAI(
        base_url=f"{server_root(base_url)}/v1",
        api_key=servers.api_key(base_url, environ) or "EMPTY",
        timeout=servers.timeout_s,
        default_headers=servers.headers,
        max_retries=0,
        http_client=DefaultAsyncHttpxClient(timeout=servers.timeout_s, trust_env=not is_direct(base_url, environ)),
    )
    return ModelClient(client, keeps_tokens=settings.trajectory_strategy == "interleaved" and not settings.is_plain)


def load_environment(settings: HostSettings) -> vf.Environment:
    """Call the `load_environment` of the environment's package with its arguments."""
    env_id = settings.env_id
    require_installed(env_id)
    try:
        if file_of(env_id) is None:
            return vf.load_environment(env_id, **settings.args)
        env = import_by_path(env_id)(**settings.args)
        if not isinstance(env, vf.Environment):
            raise TypeError(f"it returned {type(env).__name__}, not a verifiers.Environment")
        return env
    except (Exception, SystemExit) as exc:  # user code may raise anything: it is reported with the environment's name
        cause = exc.__cause__ or exc
        if isinstance(cause, AttributeError) and LOADER in str(cause):
            raise EnvironmentLoadError(
                f"env.id = {env_id!r} has no load_environment(**args), by which environments of the v0 API are loaded; a "
                f"taskset of the v1 API needs verifiers 0.4: install it into a virtual environment of its own with: "
                f"uv run trivet env install {env_id}"
            ) from None
        raise make_load_error(settings, exc, called=LOADER) from exc
