"""Loads an environment of the v1 API, verifiers 0.4 and newer: its configuration, its tasks, and the clients of the servers.

It also ties the programs and containers that verifiers starts on this machine to this worker process: harnesses, their setup, tool
servers. verifiers gives each program a session of its own, and ends programs and containers when their rollout is over. A worker
that is killed cannot do that. So the kernel ends its programs (`_tie`), and the pool removes its containers (`tie_containers`).
"""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from verifiers.v1 import AgentConfig, EnvConfig, SubprocessConfig, Task, runtimes
from verifiers.v1.configs.select import SelectConfig  # pyright: ignore[reportMissingImports]  checked with 0.3.1
from verifiers.v1.runtimes.subprocess import SubprocessRuntime
from verifiers.v1.utils.loaders import env_config_type, harness_class, load_environment, resolve_env_config

from trivet.environments.apis.groups import StageBoard
from trivet.environments.apis.load import make_load_error, require_installed
from trivet.environments.apis.rewards import ScoreForm, guard
from trivet.environments.apis.v1.play import V1Host, use_trivet_clients
from trivet.environments.examples import digest_records, hash_fields
from trivet.environments.workers.containers import APPTAINER, SCOPE, record_engine
from trivet.errors import EnvironmentLoadError
from trivet.process.lifetime import tied_command
from trivet.wire.groups import EnvironmentInfo
from trivet.wire.workers import HostSettings

_STARTERS = ("run", "open_process", "run_background")
"""The methods of verifiers' subprocess runtime that start a program. Their first argument is its command line."""
_TIED_MARK = "__trivet_tied__"
"""The attribute of a function that this module has wrapped, so that it is not wrapped twice."""


def load(settings: HostSettings, *, environ: Mapping[str, str], stages: StageBoard) -> V1Host:
    """Load the environment that `settings` name; raises as `load_host`.

    Args:
        environ: the environment variables, with the directory of the worker's temporary files.
    """
    use_trivet_clients()
    for starter in _STARTERS:
        start = getattr(SubprocessRuntime, starter)
        if not hasattr(start, _TIED_MARK):
            setattr(SubprocessRuntime, starter, _tie(start))
    if SCOPE in environ:
        tie_containers(Path(environ["TMPDIR"]))
    try:
        data, select = read_arguments(settings.env_id, settings.args)
        env = load_environment(make_config(data, name=settings.name))
        taskset: Any = env.taskset  # pyright reads the methods of verifiers 0.3.1
        selected = taskset.select(select)
        if not selected.bounded and select.limit is None:
            raise EnvironmentLoadError(
                f"the tasks of environment {settings.name!r} have no end; say how many are used with args.select.limit"
            )
        tasks = list(selected)
    except EnvironmentLoadError:
        raise
    except (Exception, SystemExit) as exc:  # user code may raise anything: it is reported with the environment's name
        if isinstance(exc, ModuleNotFoundError):
            require_installed(settings.env_id)
        raise make_load_error(settings, exc, called="loading the taskset") from exc
    guard_rewards(type(env.taskset).task_type())
    records = [task.data.model_dump(mode="json") for task in tasks]
    digest, keys = digest_records(records), settings.hash_keys
    # A task's hash covers its fields `keys`. If no task has any of these fields, it covers the task's own key.
    columns = [
        [record.get(name) for record in records] for name in keys if any(record.get(name) is not None for record in records)
    ]
    info = EnvironmentInfo(
        num_examples=len(tasks),
        num_eval_examples=len(tasks),
        train_digest=digest,
        eval_digest=digest,
        example_hashes=hash_fields(columns or [[task.key for task in tasks]]) if keys else [],
    )
    return V1Host(env=env, tasks=tasks, settings=settings, info=info, stages=stages)


def read_arguments(env_id: str, args: Mapping[str, Any]) -> tuple[dict[str, Any], SelectConfig]:
    """Split the arguments `args` into the data of the environment's configuration and the selection of its tasks.

    `args.select` is the selection. Keys that the environment's configuration does not have go to the taskset's configuration.
    `env_id` names the taskset. If `args.taskset.id` names a taskset, `env_id` names the environment instead.
    """
    data = dict(args)
    select = SelectConfig.model_validate(data.pop("select", {}))
    taskset = dict(data.pop("taskset", {}))
    if "id" in taskset:
        data["id"] = env_id
    else:
        taskset["id"] = env_id
    fields = env_config_type(taskset["id"], data.get("id", "")).model_fields
    for name in [name for name in data if name not in fields]:
        taskset[name] = data.pop(name)
    return {**data, "taskset": taskset}, select


def make_config(data: Mapping[str, Any], *, name: str) -> EnvConfig:
    """Return the configuration. Every agent without a runtime of its author's or user's choice runs in a process of this machine.

    verifiers' own default runtime is a sandbox that costs money.

    Raises:
        EnvironmentLoadError: such an agent executes commands of the model, which must not happen without the user's choice.
    """
    config = resolve_env_config(dict(data))
    harnesses = config.agent_harnesses()
    agents_on_machine: dict[str, AgentConfig] = {}
    for agent, spec in config:
        if not isinstance(spec, AgentConfig):
            continue
        author_spec, user_spec = type(config).model_fields[agent].default, data.get(agent)
        if "runtime" in author_spec.model_fields_set or (isinstance(user_spec, Mapping) and "runtime" in user_spec):
            continue
        harness = harness_class(harnesses[agent].id)
        if harness.EXECUTES_CODE or harness.NEEDS_CONTAINER:
            raise EnvironmentLoadError(
                f"environment {name!r}: harness {harnesses[agent].id!r} of its agent {agent!r} runs commands that the model "
                f'writes, and nothing says where. Set args.{agent}.runtime.type, e.g. to "docker"; "subprocess" runs them on '
                f'this machine without isolation. args.{agent}.harness.id = "null" is a chat without a shell'
            )
        agents_on_machine[agent] = spec.model_copy(update={"runtime": SubprocessConfig()})
    return config.model_copy(update=agents_on_machine)


def guard_rewards(task_class: type[Task]) -> None:
    """Wrap every reward function, metric and judge of the tasks, also judges from the configuration. May be called again."""
    find_hooks, find_judges = task_class.hooks, task_class.plugged_judges

    def hooks(task: Task, attr: str) -> list[Callable[..., Any]]:
        functions = find_hooks(task, attr)
        if attr not in ("reward", "metric"):
            return functions
        return [
            guard(function, scores=ScoreForm.NAMED, is_metric=attr == "metric" or getattr(function, "_vf_weight", 1.0) == 0)
            for function in functions
        ]

    def plugged_judges(task: Task) -> list[Any]:
        judges: list[Any] = find_judges(task)
        for judge in judges:
            is_metric = judge.config.weight == 0
            judge.score = guard(judge.score, scores=ScoreForm.NAMED, is_metric=is_metric, name=judge.reward_name)
        return judges

    task_class.hooks, task_class.plugged_judges = hooks, plugged_judges  # type: ignore[method-assign]  no other place to wrap them


def _tie(start: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Wrap a method that starts a program, so that the program ends when this process ends."""

    async def start_tied(self: SubprocessRuntime, argv: list[str], *args: Any, **kwargs: Any) -> Any:
        return await start(self, tied_command(argv), *args, **kwargs)

    setattr(start_tied, _TIED_MARK, True)
    return start_tied


def tie_containers(directory: Path) -> None:
    """Make verifiers' container runtimes record their engine in `directory`, this worker's, for the pool. May be called again."""

    def tie(init: Callable[..., None]) -> Callable[..., None]:
        def init_and_record(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            engine = getattr(self, "engine", APPTAINER)
            if engine == APPTAINER:
                self._instance = f"{directory.name}-{self._instance}"
            record_engine(directory, engine)

        setattr(init_and_record, _TIED_MARK, True)
        return init_and_record

    for name in ("DockerRuntime", "ApptainerRuntime"):  # the runtime for Podman is a DockerRuntime with another engine
        runtime: Any = getattr(runtimes, name, None)
        if runtime is not None and not hasattr(runtime.__init__, _TIED_MARK):
            runtime.__init__ = tie(runtime.__init__)
