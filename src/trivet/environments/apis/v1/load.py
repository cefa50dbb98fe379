"""Loads an environment of the v1 API, verifiers 0.4 and newer: its configuration, its tasks, and the clients of the servers.

It also ties what verifiers starts on this machine to this process: harnesses, their setup, tool servers, and containers. verifiers
gives each program a session of its own and ends it when its rollout is over, and so with containers. A worker that is killed cannot
do that: the kernel ends its programs, and the pool removes its containers (`workers.containers`).
"""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from verifiers.v1 import AgentConfig, EnvConfig, SubprocessConfig, Task, runtimes
from verifiers.v1.configs.select import SelectConfig  # pyright: ignore[reportMissingImports]  checked with 0.3.1
from verifiers.v1.runtimes.subprocess import SubprocessRuntime
from verifiers.v1.utils.loaders import env_config_type, harness_class, load_environment, resolve_env_config

from trivet.environments.apis.groups import StageBoard
from trivet.environments.apis.load import load_failure, require_installed
from trivet.environments.apis.rewards import Scores, guard
from trivet.environments.apis.v1.play import V1Host, use_trivet_clients
from trivet.environments.examples import digest_rows, hash_fields
from trivet.environments.workers.containers import APPTAINER, SCOPE, note_engine
from trivet.errors import EnvironmentLoadError
from trivet.process.lifetime import tied_command
from trivet.wire.groups import EnvironmentInfo
from trivet.wire.workers import HostSettings

_STARTERS = ("run", "open_process", "run_background")
"""The methods of the subprocess runtime that start a program. Their first argument is its command line."""
_TIED = "__trivet_tied__"


def load(settings: HostSettings, *, environ: Mapping[str, str], stages: StageBoard) -> V1Host:
    """Load the environment that `settings` name. `environ` says where the worker's temporary files are."""
    use_trivet_clients()
    for starter in _STARTERS:
        start = getattr(SubprocessRuntime, starter)
        if not hasattr(start, _TIED):
            setattr(SubprocessRuntime, starter, _tied(start))
    if SCOPE in environ:
        tie_containers(Path(environ["TMPDIR"]))
    try:
        data, select = read_arguments(settings.env_id, settings.args)
        env = load_environment(make_config(data, name=settings.name))
        taskset: Any = env.taskset  # pyright reads the methods of verifiers 0.3.1
        chosen = taskset.select(select)
        if not chosen.bounded and select.limit is None:
            raise EnvironmentLoadError(
                f"the tasks of environment {settings.name!r} have no end; say how many are used with args.select.limit"
            )
        tasks = list(chosen)
    except EnvironmentLoadError:
        raise
    except (Exception, SystemExit) as exc:  # an environment is the user's code: whatever it raises is reported with its name
        if isinstance(exc, ModuleNotFoundError):
            require_installed(settings.env_id)
        raise load_failure(settings, exc, called="loading the taskset") from exc
    guard_rewards(type(env.taskset).task_type())
    rows = [task.data.model_dump(mode="json") for task in tasks]
    digest, keys = digest_rows(rows), settings.hash_keys
    # A fingerprint of each task: of its fields `keys`, or, when no task has one of them, of its own key.
    columns = [[row.get(name) for row in rows] for name in keys if any(row.get(name) is not None for row in rows)]
    info = EnvironmentInfo(
        num_examples=len(tasks),
        num_eval_examples=len(tasks),
        train_digest=digest,
        eval_digest=digest,
        example_hashes=hash_fields(columns or [[task.key for task in tasks]]) if keys else [],
    )
    return V1Host(env, tasks, settings, info=info, stages=stages)


def read_arguments(env_id: str, args: Mapping[str, Any]) -> tuple[dict[str, Any], SelectConfig]:
    """Return the data of the environment's configuration, and which of its tasks are used.

    `args.select` chooses tasks. Other keys that the environment's configuration does not have are the taskset's. `env_id` names
    the taskset, or the environment where `args.taskset.id` names another taskset.
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
    """Return the configuration, with every agent in a process of this machine unless its author or the user chose another place.

    verifiers' own default is a sandbox that has to be paid for.
    """
    config = resolve_env_config(dict(data))
    harnesses = config.agent_harnesses()
    places: dict[str, AgentConfig] = {}
    for agent, spec in config:
        if not isinstance(spec, AgentConfig):
            continue
        declared, given = type(config).model_fields[agent].default, data.get(agent)
        if "runtime" in declared.model_fields_set or (isinstance(given, Mapping) and "runtime" in given):
            continue
        harness = harness_class(harnesses[agent].id)
        if harness.EXECUTES_CODE or harness.NEEDS_CONTAINER:
            raise EnvironmentLoadError(
                f"environment {name!r}: harness {harnesses[agent].id!r} of its agent {agent!r} runs commands that the model "
                f'writes, and nothing says where. Set args.{agent}.runtime.type, e.g. to "docker"; "subprocess" runs them on '
                f'this machine without isolation. args.{agent}.harness.id = "null" is a chat without a shell'
            )
        places[agent] = spec.model_copy(update={"runtime": SubprocessConfig()})
    return config.model_copy(update=places)


def guard_rewards(task_class: type[Task]) -> None:
    """Wrap every reward function, metric and judge of the tasks, those that a configuration plugs in too. May be called again."""
    find_hooks, find_judges = task_class.hooks, task_class.plugged_judges

    def hooks(task: Task, attr: str) -> list[Callable[..., Any]]:
        functions = find_hooks(task, attr)
        if attr not in ("reward", "metric"):
            return functions
        return [
            guard(function, scores=Scores.NAMED, is_metric=attr == "metric" or getattr(function, "_vf_weight", 1.0) == 0)
            for function in functions
        ]

    def plugged_judges(task: Task) -> list[Any]:
        judges: list[Any] = find_judges(task)
        for judge in judges:
            is_metric = judge.config.weight == 0
            judge.score = guard(judge.score, scores=Scores.NAMED, is_metric=is_metric, name=judge.reward_name)
        return judges

    task_class.hooks, task_class.plugged_judges = hooks, plugged_judges  # type: ignore[method-assign]  no other place to wrap them


def _tied(start: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return a method of a subprocess runtime such that the program that it starts ends with this process."""

    async def start_tied(self: SubprocessRuntime, argv: list[str], *args: Any, **kwargs: Any) -> Any:
        return await start(self, tied_command(argv), *args, **kwargs)

    setattr(start_tied, _TIED, True)
    return start_tied


def tie_containers(directory: Path) -> None:
    """Have every runtime of containers note its engine in `directory`, that of this worker. May be called again."""

    def noting(make: Callable[..., None]) -> Callable[..., None]:
        def make_noted(self: Any, *args: Any, **kwargs: Any) -> None:
            make(self, *args, **kwargs)
            engine = getattr(self, "engine", APPTAINER)
            if engine == APPTAINER:
                self._instance = f"{directory.name}-{self._instance}"
            note_engine(directory, engine)

        setattr(make_noted, _TIED, True)
        return make_noted

    for name in ("DockerRuntime", "ApptainerRuntime"):  # a Podman runtime is one of Docker's with another engine
        runtime: Any = getattr(runtimes, name, None)
        if runtime is not None and not hasattr(runtime.__init__, _TIED):
            runtime.__init__ = noting(runtime.__init__)
