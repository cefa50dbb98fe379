"""Makes the configuration of a run from what a program passes to `RLTrainer` and `SFTTrainer`. Starts nothing.

The keys of the dialect go the way of `vf-rl`; sections and functions are laid over them as keys of the run.
"""

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trivet.config.findings import Findings
from trivet.config.load import load_sources
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.sft import SftConfig
from trivet.config.schema.vf_rl import VfRLConfig, VfTrainerArgs
from trivet.config.values import Entry
from trivet.dialects.vf_translation import load_run
from trivet.environments.apis.load import LOADER, require_installed
from trivet.errors import ConfigError
from trivet.key_names import use_names
from trivet.library.arguments import RUN_KEYS, RLArguments, SFTArguments, entries_of, show_notices, written_values
from trivet.library.functions import FunctionFiles, split_partial
from trivet.library.process import PYTHON_NAMES
from trivet.process.imports import file_of

Environment = str | Callable[..., Any]
"""An environment: its id, or a function that returns it."""

_ARGUMENTS = "RLConfig"
"""Origin of the values that a user passes in `RLConfig`, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A run that was checked."""

    config: RLConfig
    functions: FunctionFiles
    """The files of the program's functions, which are not written yet."""


@use_names(PYTHON_NAMES)
def plan_run(model: str | Path, env: Environment, args: RLArguments, *, env_args: Mapping[str, Any]) -> PlannedRun:
    """Return the run that the arguments of `RLTrainer` describe.

    Raises:
        ConfigError: lists every problem, by the names that the user wrote.
        EnvironmentLoadError: the environment is not installed.
    """
    if not isinstance(model, str | Path):
        raise ConfigError(
            f"model must be a Hugging Face name or a directory, got an object of type {type(model).__name__}: other processes load "
            "it; save it with save_pretrained and give that directory"
        )
    if not (isinstance(env, str) or callable(env)):
        raise ConfigError(
            f"env must be the id of an environment or a function that returns one, got an object of type {type(env).__name__}: "
            "other processes make it"
        )
    env, fixed = (env, {}) if isinstance(env, str) else split_partial(env)
    name = env if isinstance(env, str) else name_of_environment(env)
    output_dir = Path(args.output_dir or f"outputs/{args.run_name or name.rpartition('/')[2]}")
    functions = FunctionFiles(output_dir)
    env_args = {**fixed, **env_args}
    if inspect.isfunction(env):
        try:
            inspect.signature(env).bind(**env_args)
        except TypeError as exc:
            raise ConfigError(f"env_args: {env.__name__!r} cannot be called with them: {exc}") from exc
    written = {key: value for key, value in written_values(args).items() if key in VfTrainerArgs.model_fields}
    if args.deterministic:
        written.setdefault("bf16", False)  # the dialect's default is the device's own dtype
    dialect = {
        "model": str(model),
        "env": {"id": name, "args": env_args},
        "inference": {"gpus": len(args.inference_gpu_ids or [0])},
        "trainer": {"gpus": len(args.trainer_gpu_ids or [0]), "args": {**written, "output_dir": str(output_dir)}},
    }
    loaded = load_sources(VfRLConfig, [entries_of(dialect, origin=_ARGUMENTS)], Findings())
    run_entries = [
        *_environment_entries(env, name, args, functions, env_args),
        *entries_of({key: getattr(args, key) for key in RUN_KEYS if key in args.model_fields_set}, origin=_ARGUMENTS),
        *entries_of(_chosen(args.loss, functions, argument="loss"), origin=_ARGUMENTS, path=("trainer", "loss")),
        *entries_of(
            _chosen(args.advantage, functions, argument="advantage"), origin=_ARGUMENTS, path=("orchestrator", "advantage")
        ),
    ]
    run = load_run(loaded, environ=os.environ, run_entries=run_entries)
    show_notices(run.notices)
    for configured in run.config.orchestrator.environments.values():
        if file_of(configured.package) is None:  # the file of a function is written when the run is started
            require_installed(configured.package)
    return PlannedRun(config=run.config, functions=functions)


def plan_sft(model: str | Path | None, data: str | Path | None, args: SFTArguments) -> SftConfig:
    """Return the configuration that the arguments of `SFTTrainer` describe.

    Raises:
        ConfigError: lists every problem.
    """
    values = written_values(args)
    named = {
        **({"model": {"name": str(model)}} if model is not None else {}),
        **({"data": {"name": str(data)}} if data is not None else {}),
    }
    sources = [entries_of(values, origin="SFTConfig"), entries_of(named, origin="SFTTrainer")]
    loaded = load_sources(SftConfig, sources, Findings())
    show_notices(loaded.notices)
    return loaded.config


def name_of_environment(function: Callable[..., Any]) -> str:
    """Return the name that the environment of a function has in logs, metrics and paths."""
    name = getattr(function, "__name__", "environment")
    if name != LOADER:
        return name.removeprefix("load_").replace("_", "-")
    file = function.__globals__.get("__file__")
    return Path(file).stem if file else "notebook"


def _environment_entries(
    env: Environment, name: str, args: RLArguments, functions: FunctionFiles, env_args: Mapping[str, Any]
) -> list[Entry]:
    """Name the function that makes the environment; an environment that is an id alone is the dialect's own key."""
    if isinstance(env, str) and args.rewards is None:
        return []
    path = env if isinstance(env, str) else functions.path_of(env, argument="env")
    if args.rewards is not None:
        pairs = [reward if isinstance(reward, tuple) else (reward, 1.0) for reward in args.rewards]
        paths = [functions.path_of(reward, argument="rewards") for reward, _ in pairs]
        path = functions.with_rewards(path, paths, weights=[weight for _, weight in pairs])
    table = {"id": path, "name": name.rpartition("/")[2], "args": dict(env_args)}
    places = [("orchestrator", "env"), *([("orchestrator", "eval", "env")] if args.eval_strategy == "steps" else [])]
    return [Entry(path=place, value=[table], origin="RLTrainer") for place in places]


def _chosen(value: Any, functions: FunctionFiles, *, argument: str) -> dict[str, Any]:
    """Return the keys of a section that is given as its type, as a table, as its model, or as a function."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"type": "none" if value == "None" else value}
    if not callable(value):
        return dict(value) if isinstance(value, dict) else written_values(value)
    function, fixed = split_partial(value)
    path = functions.path_of(function, argument=argument)
    return {"type": "custom", "import_path": path, **({"kwargs": fixed} if fixed else {})}
