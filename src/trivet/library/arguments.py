"""The arguments that a program passes, and the configuration of the run that they describe. Starts nothing.

Fields and defaults are those of the configuration's models. A wrong name or value is refused where it is written, with the nearest
name, as on the command line. The keys of the documented dialect go the way of `vf-rl`; sections of the configuration and Python
functions are laid over them as keys of the run.
"""

import inspect
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from trivet.config.findings import Findings
from trivet.config.load import SectionT, load_sources
from trivet.config.schema.base import Section
from trivet.config.schema.deployment import RecoveryConfig
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.inference import InferenceConfig
from trivet.config.schema.orchestrator import AdvantageConfig, OrchestratorConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.sft import SftConfig
from trivet.config.schema.shared import CkptConfig, DetectorsConfig, LogConfig, WeightsConfig
from trivet.config.schema.trainer import LossConfig, TrainerConfig
from trivet.config.schema.vf_rl import VfRLConfig, VfTrainerArgs
from trivet.config.spellings import use_current_names
from trivet.config.values import Entry, flatten
from trivet.dialects.vf_translation import load_run
from trivet.environments.apis.load import LOADER, require_installed
from trivet.errors import ConfigError
from trivet.key_names import use_names
from trivet.library.functions import FunctionFiles, split_partial
from trivet.library.process import PYTHON_NAMES
from trivet.process.imports import file_of
from trivet.shown_text import printable

logger = logging.getLogger(__name__)

_DIALECT = ("trainer", "args")
"""The section of the dialect whose keys a program passes by their names alone."""


class _RLKeys(VfTrainerArgs):
    """The keys of `RLArguments`. A section is given as its model or as a dictionary; None there means the default."""

    loss: dict[str, Any] | LossConfig | Callable[..., Any] | str | None = None
    """A function of one sample (trivet.trainer.losses.custom), the `type` of a loss, or the keys of [trainer.loss]."""
    advantage: dict[str, Any] | AdvantageConfig | Callable[..., Any] | str | None = None
    """A function of one group's rewards, the `type` of an advantage, or the keys of [orchestrator.advantage]."""
    rewards: list[Callable[..., Any] | tuple[Callable[..., Any], float]] | None = None
    """Reward functions of verifiers, each alone or with its weight, that replace the environment's own."""
    callbacks: list[Callable[..., Any]] = []
    """Called in this process with each step that was trained."""
    max_model_len: int | None = None
    """Longest context of the server, tokens; unset: max_seq_len."""
    deterministic: bool | None = None
    """Two runs give the same bytes."""
    inference_gpu_ids: list[int] | None = None
    """GPUs of the inference server; unset: the first."""
    trainer_gpu_ids: list[int] | None = None
    """GPUs of the trainer; unset: the second, or the only one."""
    teacher_gpu_ids: list[int] | None = None
    """GPUs of a teacher's server."""
    trainer_cpu_ranks: int | None = None
    """Trainer ranks on a machine without a GPU."""
    shutdown_timeout_s: float | None = None
    """Time between the request to stop and the kill, seconds."""
    trainer: TrainerConfig | dict[str, Any] | None = None
    """Keys of [trainer]."""
    orchestrator: OrchestratorConfig | dict[str, Any] | None = None
    """Keys of [orchestrator]."""
    inference: InferenceConfig | dict[str, Any] | None = None
    """Keys of [inference]."""
    teacher_inference: InferenceConfig | dict[str, Any] | None = None
    """Keys of [teacher_inference]."""
    ckpt: CkptConfig | dict[str, Any] | None = None
    """Keys of [ckpt]."""
    weights: WeightsConfig | dict[str, Any] | None = None
    """Keys of [weights]."""
    recovery: RecoveryConfig | dict[str, Any] | None = None
    """Keys of [recovery]."""
    detectors: DetectorsConfig | dict[str, Any] | None = None
    """Keys of [detectors]."""
    log: LogConfig | dict[str, Any] | None = None
    """Keys of [log]."""


FUNCTION_KEYS = {"loss", "advantage", "rewards", "callbacks"}
"""Keys of `RLArguments` that may hold Python functions."""
RUN_KEYS = _RLKeys.model_fields.keys() - VfTrainerArgs.model_fields.keys() - FUNCTION_KEYS
"""Keys of `RLArguments` that are keys of a run, by the same name."""


class RLArguments(_RLKeys):
    """Arguments of a run, `trivet.RLConfig`."""

    if not TYPE_CHECKING:  # an editor completes the fields, which a constructor of its own would hide

        def __init__(self, **values: Any) -> None:
            findings = Findings()
            entries = [Entry(path=(*_DIALECT, name), value=value, origin="RLConfig") for name, value in values.items()]
            with use_names(PYTHON_NAMES):
                current = {entry.path[-1]: entry.value for entry in use_current_names(VfRLConfig, entries, findings)}
                super().__init__(**_check(_RLKeys, current, findings, origin="RLConfig"))


class SFTArguments(SftConfig):
    """Arguments of supervised fine-tuning, `trivet.SFTConfig`: the keys of `sft.toml`."""

    if not TYPE_CHECKING:

        def __init__(self, **values: Any) -> None:
            super().__init__(**_check(SftConfig, values, Findings(), origin="SFTConfig"))


class EvalArguments(EvalConfig):
    """Arguments of an evaluation, `trivet.EvalConfig`: the keys of the command `eval`."""

    if not TYPE_CHECKING:

        def __init__(self, **values: Any) -> None:
            super().__init__(**_check(EvalConfig, values, Findings(), origin="EvalConfig"))


def _check(kind: type[SectionT], values: Mapping[str, Any], findings: Findings, *, origin: str) -> dict[str, Any]:
    """Return the values of the keys that were given, validated."""
    loaded = load_sources(kind, [entries_of(values, origin=origin)], findings)
    config = loaded.config
    show_notices(loaded.notices)
    return {name: getattr(config, name) for name in config.model_fields_set}


def show_notices(notices: Iterable[str]) -> None:
    """Say what loading a configuration must tell the user."""
    for notice in notices:
        logger.warning("notice: %s", printable(notice))


def entries_of(values: Mapping[str, Any], *, origin: str, path: tuple[str, ...] = ()) -> list[Entry]:
    """Return the values as one source of a configuration: of a section those that were set, and its type."""
    return list(flatten(Entry(path=path, value=_as_data(dict(values)), origin=origin)))


def written_values(section: Section) -> dict[str, Any]:
    """Return the keys of a section that were set, and its `type`, which says what the others mean."""
    names = [name for name in type(section).model_fields if name in section.model_fields_set or name == "type"]
    return {name: getattr(section, name) for name in names}


def _as_data(value: Any) -> Any:
    """Return a value as a file would give it: null is the text "None" there, and a path is a text."""
    match value:
        case None:
            return "None"
        case PurePath():
            return str(value)
        case Section():
            return {name: _as_data(item) for name, item in written_values(value).items()}
        case list():
            return [_as_data(item) for item in value]
        case dict():
            return {name: _as_data(item) for name, item in value.items()}
        case _:
            return value


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
    """Return the run that the arguments of `RLTrainer` describe. A ConfigError lists every problem by the user's names."""
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
    """Return the configuration that the arguments of `SFTTrainer` describe. A ConfigError lists every problem."""
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
