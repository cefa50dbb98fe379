"""Plans an evaluation from its configuration, files and the names of the servers, before anything is written."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trivet.config.layout import RunLayout
from trivet.config.schema.environment import EvalEnvConfig
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.inference import ClientConfig
from trivet.environments.packages.interpreters import require_environment
from trivet.errors import ConfigError, ForeignPolicy, InferenceError, WeightsError
from trivet.evaluation.endpoints import KEY_VARIABLE, Endpoint, choose_client
from trivet.evaluation.origin import PolicyOrigin, read_origin, require_free_servers
from trivet.evaluation.resuming import require_resumable, results_layout
from trivet.evaluation.servers import EvalServers
from trivet.evaluation.targets import BASE, Target, present_targets
from trivet.weights.adapters import base_of, is_adapter, is_same_model
from trivet.weights.manifest import read_manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPlan:
    """The policies, environments and servers of one run of `eval`."""

    config: EvalConfig
    origin: PolicyOrigin
    envs: Sequence[EvalEnvConfig]
    targets: Sequence[Target]
    """The policies that can be evaluated now."""
    client: ClientConfig
    endpoint: Endpoint | None
    layout: RunLayout
    """The directory of the results."""


def make_plan(config: EvalConfig, *, environ: Mapping[str, str]) -> EvalPlan:
    """Decide what to evaluate, on what, and where the results go.

    Raises:
        ConfigError: something that is asked for does not exist.
        EnvironmentLoadError: an environment is not installed.
    """
    origin = read_origin(config.weights_dir)
    envs = config.env or list(origin.envs)
    if not envs:
        where = f" ({config.weights_dir.parent} names none)" if config.weights_dir else ""
        raise ConfigError(f"no environment to evaluate on{where}: add --env.id ID")
    for env in envs:
        require_environment(env)
    targets = present_targets(config, envs)
    client, endpoint = choose_client(config.client, endpoints_path=config.endpoints_path, environ=environ)
    require_free_servers(client, origin, config.weights_dir)
    layout = results_layout(config)
    return EvalPlan(config=config, origin=origin, envs=envs, targets=targets, client=client, endpoint=endpoint, layout=layout)


def export_key(endpoint: Endpoint | None) -> None:
    """Put a key that the endpoints file itself contains into the environment of this process and those that it starts."""
    if endpoint is not None and endpoint.key is not None:
        os.environ[KEY_VARIABLE] = endpoint.key


async def check_servers(plan: EvalPlan, servers: EvalServers) -> str:
    """Check that the servers can do what is planned; return the model name that requests give.

    The first weights are loaded once, then the start model: so a directory that a server cannot read, or adapters of another base
    model, are found before the first result.

    Raises:
        ConfigError: they cannot.
    """
    try:
        name = await _model_name(plan, servers)
        _require_adapters_of(name, plan.targets)
        first = next((target for target in plan.targets if target.directory is not None), None)
        if first is not None:
            await servers.ensure_policy(first)
        base_digest = await servers.ensure_policy(BASE) if BASE in plan.targets or first is None else ""
    except ForeignPolicy:
        raise
    except (InferenceError, WeightsError) as exc:
        raise ConfigError(str(exc)) from exc
    if plan.config.resume_path is not None:
        digests = [(target, _digest_of(target, base_digest)) for target in plan.targets]
        require_resumable(plan.config, digests, envs=plan.envs)
    return name


async def _model_name(plan: EvalPlan, servers: EvalServers) -> str:
    asked = plan.config.model.name or (plan.endpoint.model if plan.endpoint else None)
    if servers.is_plain and asked is not None:
        return asked  # such a server may serve more than it lists, or list nothing
    return choose_model_name(plan, await servers.model_names(), asked=asked, is_plain=servers.is_plain)


def choose_model_name(plan: EvalPlan, served: Sequence[str], *, asked: str | None, is_plain: bool) -> str:
    """Return the model name that requests give.

    Args:
        served: the names that the servers list; a trivet server lists that of its model first.
        asked: the name that the user asks for.

    Raises:
        ConfigError: what is asked for is not served.
    """
    wanted = asked or plan.origin.model_name
    if not served and wanted is None:
        raise ConfigError("the servers do not tell what they serve: set model.name")
    if wanted is None or not served:
        return wanted or served[0]
    if (found := next((name for name in served if is_same_model(name, wanted)), None)) is not None:
        return found
    where = ", ".join(plan.client.base_url)
    if asked is not None:
        raise ConfigError(f"model.name ({asked}) is not served by {where}, which serves: {', '.join(served)}")
    same = "" if is_plain else f", or add --model.name {served[0]} if it is the same model"
    raise ConfigError(
        f"the run that wrote {plan.config.weights_dir} started from {wanted}, and {where} serves {', '.join(served)}; start "
        f"`uv run inference --model.name {wanted}`{same}"
    )


def _require_adapters_of(name: str, targets: Sequence[Target]) -> None:
    for target in targets:
        if target.directory is None or not is_adapter(target.directory):
            continue
        if not is_same_model(base := base_of(target.directory), name):
            raise ConfigError(
                f"{target.directory} is an adapter for {base}, and the server serves {name}: start one with "
                f"`uv run inference --model.name {base} --enable-lora`"
            )


def _digest_of(target: Target, base_digest: str) -> str:
    return base_digest if target.directory is None else read_manifest(target.directory).digest
