"""Plans an evaluation from its configuration, the published policies and the servers' models, before anything is written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trivet.config.layout import RunLayout
from trivet.config.schema.environment import EvalEnvConfig
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.inference import ClientConfig
from trivet.config.schema.shared import DEFAULT_OUTPUT_DIR
from trivet.environments.packages.interpreters import require_environment
from trivet.environments.port import EnvironmentPool
from trivet.errors import ConfigError, ForeignPolicy, InferenceError, WeightsError
from trivet.evaluation.endpoints import Endpoint, choose_client
from trivet.evaluation.evaluate import EvalSeries, make_series
from trivet.evaluation.results import TASK_FILE, explain_difference
from trivet.evaluation.servers import EvalServers, require_free_servers
from trivet.evaluation.targets import BASE, PolicyOrigin, Target, is_due, present_targets, read_origin
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
    """The entry of the endpoints file that names the server; None if the configuration names the servers itself."""
    layout: RunLayout
    """The output directory, in which results are written to `evals/`."""

    def series_of(self, target: Target) -> list[EvalSeries]:
        """Return the series of the environments that must be evaluated on the policy of `target`."""
        config, is_base = self.config, target.directory is None
        envs = [env for env in self.envs if is_base or is_due(config, target.step, env)]
        return [make_series(env, config, pool_name=env.label) for env in envs]


def make_plan(config: EvalConfig, *, environ: Mapping[str, str]) -> EvalPlan:
    """Decide which policies and environments to evaluate, on which servers, and where to write the results.

    Raises:
        ConfigError: something that the configuration names does not exist, or a live run uses one of the servers.
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


def results_layout(config: EvalConfig) -> RunLayout:
    """Return the layout of the output directory of `eval`.

    Raises:
        ConfigError: `resume_path` holds no evaluation.
    """
    if (path := config.resume_path) is None:
        default = config.weights_dir.absolute().parent if config.weights_dir is not None else DEFAULT_OUTPUT_DIR
        return RunLayout(config.output_dir or default)
    directory = path.parent if path.is_file() else path
    if (directory / TASK_FILE).is_file() or (directory.name == "evals" and directory.is_dir()):
        ancestors = (directory.absolute(), *directory.absolute().parents)
        evals = next((ancestor for ancestor in ancestors if ancestor.name == "evals"), None)
        if evals is not None:
            return RunLayout(evals.parent)
    if (directory / "evals").is_dir():
        return RunLayout(directory)
    raise ConfigError(
        f"resume_path ({path}) holds no evaluation: give the output_dir of one, which has evals/ in it, or its evals/step_N/<env>"
    )


async def check_servers(plan: EvalPlan, servers: EvalServers) -> tuple[str, str]:
    """Check that the servers can serve the planned policies.

    The first published policy is loaded once, then the start model. So a directory that a server cannot read, or an adapter of
    another base model, is found before the first result.

    Returns:
        The model name that requests give, and the digest of the start model. The digest is empty if the start model was not loaded.

    Raises:
        ConfigError: they cannot.
    """
    try:
        configured = plan.config.model.name or (plan.endpoint.model if plan.endpoint else None)
        if servers.is_plain and configured is not None:
            name = configured  # a server that is not trivet's may serve models that it does not list
        else:
            served = await servers.model_names()
            name = _choose_model_name(plan, served, configured=configured, is_plain=servers.is_plain)
        for target in plan.targets:
            if target.directory is None or not is_adapter(target.directory):
                continue
            if not is_same_model(base := base_of(target.directory), name):
                raise ConfigError(
                    f"{target.directory} is an adapter for {base}, and the server serves {name}: start one with "
                    f"`uv run inference --model.name {base} --enable-lora`"
                )
        first_published = next((target for target in plan.targets if target.directory is not None), None)
        if first_published is not None:
            await servers.ensure_policy(first_published)
        base_digest = await servers.ensure_policy(BASE) if BASE in plan.targets or first_published is None else ""
    except ForeignPolicy:
        raise
    except (InferenceError, WeightsError) as exc:
        raise ConfigError(str(exc)) from exc
    return name, base_digest


def _choose_model_name(plan: EvalPlan, served: Sequence[str], *, configured: str | None, is_plain: bool) -> str:
    """Return the model name that requests give.

    Args:
        served: the names that the servers list, which may be none. A trivet server lists its own model first.
        configured: the name that the user gave; None: the start model of the run, or else the first listed name.
    """
    wanted = configured or plan.origin.model_name
    if not served and wanted is None:
        raise ConfigError("the servers do not tell what they serve: set model.name")
    if wanted is None or not served:
        return wanted or served[0]
    if (matching := next((name for name in served if is_same_model(name, wanted)), None)) is not None:
        return matching
    where = ", ".join(plan.client.base_url)
    if configured is not None:
        raise ConfigError(f"model.name ({configured}) is not served by {where}, which serves: {', '.join(served)}")
    same = "" if is_plain else f", or add --model.name {served[0]} if it is the same model"
    raise ConfigError(
        f"the run that wrote {plan.config.weights_dir} started from {wanted}, and {where} serves {', '.join(served)}; start "
        f"`uv run inference --model.name {wanted}`{same}"
    )


def require_resumable(plan: EvalPlan, pool: EnvironmentPool, *, base_digest: str) -> None:
    """Check that `resume_path`, if set, has results of the planned tasks, and no results of other tasks in their directories.

    Raises:
        ConfigError: it has none of the planned tasks, or results of other tasks.
    """
    if (resume_path := plan.config.resume_path) is None:
        return
    resumable: list[Path] = []
    for target in plan.targets:
        digest = base_digest if target.directory is None else read_manifest(target.directory).digest
        for series in plan.series_of(target):
            task = series.make_task(pool.infos[series.pool_name], step=target.step, digest=digest)
            directory = plan.layout.evals_step(target.step, series.name)
            if difference := explain_difference(directory, task):
                raise ConfigError(difference)
            if difference is not None:
                resumable.append(directory.resolve())
    named = resume_path.parent if resume_path.is_file() else resume_path
    if not resumable or ((named / TASK_FILE).is_file() and named.resolve() not in resumable):
        present = sorted(
            str(path.parent.relative_to(plan.layout.root)) for path in plan.layout.evals.glob(f"step_*/**/{TASK_FILE}")
        )
        raise ConfigError(
            f"resume_path ({resume_path}) is none of the evaluations asked for; in {plan.layout.root} there are: "
            f"{', '.join(present) or 'none'}"
        )
