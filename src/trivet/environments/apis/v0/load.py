"""Loads an environment of the v0 API, verifiers 0.1.2 to 0.3.1, with the clients that its release calls."""

from collections.abc import Callable, Mapping

import verifiers as vf

from trivet.environments.apis.loading import load_failure
from trivet.environments.apis.release import verifiers_release
from trivet.environments.apis.v0.host import V0Host
from trivet.environments.apis.v0.rubrics import guard_rewards
from trivet.environments.apis.v0.runner import GroupRunner, ServerClient
from trivet.environments.packages.installed import require_installed
from trivet.environments.workers.stages import StageBoard
from trivet.errors import EnvironmentLoadError
from trivet.process.imports import import_by_path, is_in_a_file
from trivet.process.proxies import is_direct
from trivet.wire.servers import server_root
from trivet.wire.workers import HostSettings

_FIRST_WITH_CLIENTS = (0, 1, 11)
"""Since then a rollout gets a client of verifiers' own type; before, the OpenAI client."""


def load(settings: HostSettings, *, environ: Mapping[str, str], stages: StageBoard) -> V0Host:
    """Load the environment that `settings` name.

    Raises:
        EnvironmentLoadError: the package is not installed, or its load_environment raised.
    """
    env = load_environment(settings)
    guard_rewards(env)
    runner = GroupRunner(
        env=env,
        label=settings.name,
        model_name=settings.model_name,
        trajectory_strategy=settings.trajectory_strategy,
        on_reward_error=settings.on_reward_error,
        timeout_s=settings.rollout_timeout_s,
        is_plain=settings.is_plain,
        stages=stages,
    )
    return V0Host(runner, make_client=_client_maker(settings, environ), hash_keys=tuple(settings.hash_keys))


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


def _client_maker(settings: HostSettings, environ: Mapping[str, str]) -> Callable[[str], ServerClient]:
    keeps_tokens = settings.trajectory_strategy == "interleaved" and not settings.is_plain
    release = verifiers_release()
    assert release is not None

    def make_client(base_url: str) -> ServerClient:
        timeout_s, trust_env = settings.servers.timeout_s, not is_direct(base_url, environ)
        options = {
            "base_url": f"{server_root(base_url)}/v1",
            "api_key": settings.servers.api_key(base_url, environ) or "EMPTY",
            "timeout": timeout_s,
            "default_headers": settings.servers.headers,
            "max_retries": 0,
        }
        if release < _FIRST_WITH_CLIENTS:
            from trivet.environments.apis.v0.openai_client import OpenAIServer

            return OpenAIServer(keeps_tokens=keeps_tokens, trust_env=trust_env, **options)
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        from trivet.environments.apis.v0.model_client import ModelClient

        http = DefaultAsyncHttpxClient(timeout=timeout_s, trust_env=trust_env)
        return ModelClient(AsyncOpenAI(http_client=http, **options), keeps_tokens=keeps_tokens)

    return make_client
