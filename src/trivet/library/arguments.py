"""Turns the arguments that a Python program passes into the configuration of a run. Starts nothing.

Fields and defaults are those of the configuration's models. A wrong name or value is refused when the arguments are created, with
the nearest name, as on the command line. `RLConfig` has the keys of [trainer.args] in the dialect of `vf-rl`, which are translated
as `vf-rl` does. It also takes sections of the run's configuration and Python functions. Their values win over the translated ones.
"""

import inspect
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from pydantic import Field

from trivet.config.findings import Findings
from trivet.config.load import SectionT, load_sources
from trivet.config.schema.base import Section
from trivet.config.schema.deployment import RecoveryConfig
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.inference import InferenceConfig
from trivet.config.schema.losses import LossConfig
from trivet.config.schema.orchestrator import AdvantageConfig, OrchestratorConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.sft import SftConfig
from trivet.config.schema.shared import CkptConfig, DetectorsConfig, LogConfig, TrackingConfig, WeightsConfig
from trivet.config.schema.trainer import TrainerConfig
from trivet.config.schema.vf_rl import VfRLConfig, VfTrainerArgs
from trivet.config.spellings import use_current_names
from trivet.config.values import Entry, flatten
from trivet.dialects.vf_translation import load_run
from trivet.environments.apis.load import LOADER, require_installed
from trivet.errors import ConfigError
from trivet.key_names import use_names
from trivet.library.functions import FunctionFiles, name_of, without_partial
from trivet.library.process import PYTHON_NAMES
from trivet.library.rewards import RewardTask, make_environment
from trivet.process.imports import file_of
from trivet.shown_text import printable

logger = logging.getLogger(__name__)

_DIALECT = ("trainer", "args")
"""The section of the dialect whose keys are fields of `RLArguments`, without the name of the section."""


class _RLKeys(VfTrainerArgs):
    """The fields of `RLArguments`. A section is given as its model or as a dictionary, or is None for the defaults."""

    loss: dict[str, Any] | LossConfig | Callable[..., Any] | str | None = None
    """A function of one sample (trivet.trainer.losses.custom), the `type` of a loss, or the keys of [trainer.loss]."""
    advantage: dict[str, Any] | AdvantageConfig | Callable[..., Any] | str | None = None
    """A function of one group's rewards, the `type` of an advantage, or the keys of [orchestrator.advantage]."""
    reward_weights: list[float] | None = None
    """A weight for each of `reward_funcs`; unset: 1."""
    max_tool_calling_iterations: int | None = Field(default=None, ge=0)
    """The most turns of a rollout in which the model calls `tools`; unset: until it answers without one or the context is full."""
    callbacks: list[Any] = []
    """Functions that are called in this process with each trained step, or objects with methods as `on_step`."""
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
    tracking: TrackingConfig | dict[str, Any] | None = None
    """Keys of [tracking]."""


OWN_KEYS = {"loss", "advantage", "reward_weights", "max_tool_calling_iterations", "callbacks"}
"""Keys of `RLArguments` that may hold Python functions or configure them."""
RUN_KEYS = _RLKeys.model_fields.keys() - VfTrainerArgs.model_fields.keys() - OWN_KEYS
"""The fields of `RLArguments` that a run's configuration has under the same name."""


class RLArguments(_RLKeys):
    """The arguments of `trivet.RLTrainer`. Programs import the class as `trivet.RLConfig`."""

    if not TYPE_CHECKING:  # without this constructor, editors complete the names of the fields

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
    """Validate `values` as keys of `kind`, and return those that were given. Notices are shown; a problem is a ConfigError."""
    loaded = load_sources(kind, [entries_of(values, origin=origin)], findings)
    config = loaded.config
    show_notices(loaded.notices)
    return {name: getattr(config, name) for name in config.model_fields_set}


def show_notices(notices: Iterable[str]) -> None:
    """Log the notices of loading a configuration."""
    for notice in notices:
        logger.warning("notice: %s", printable(notice))


def entries_of(values: Mapping[str, Any], *, origin: str, path: tuple[str, ...] = ()) -> list[Entry]:
    """Return the values as entries of one source. Of a section only the keys that were set, and its type, are included."""
    return list(flatten(Entry(path=path, value=_as_data(dict(values)), origin=origin)))


def written_values(section: Section) -> dict[str, Any]:
    """Return the keys of a section that were set, with their values, and its `type`, on which the meaning of the others depends."""
    names = [name for name in type(section).model_fields if name in section.model_fields_set or name == "type"]
    return {name: getattr(section, name) for name in names}


def _as_data(value: Any) -> Any:
    """Return a value in the form that it has in a TOML file, where null is the text "None" and a path is text."""
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

_ORIGIN = "RLConfig"
"""The origin, in messages, of the values that a user passes in `RLConfig`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """The checked configuration of a run, and the functions that it needs."""

    config: RLConfig
    functions: FunctionFiles
    """The program's functions. Their files are written when the run starts."""


@use_names(PYTHON_NAMES)
def plan_run(
    model: str | Path,
    env: Environment | None,
    args: RLArguments,
    *,
    env_args: Mapping[str, Any],
    task: RewardTask | None = None,
) -> PlannedRun:
    """Return the run that the arguments of `RLTrainer` describe. A ConfigError lists all problems, under the user's names."""
    if not isinstance(model, str | Path):
        raise ConfigError(
            f"model must be a Hugging Face name or a directory, got an object of type {type(model).__name__}: other processes load "
            "it; save it with save_pretrained and give that directory"
        )
    env = _require_environment(env, task, args)
    name = name_of_environment(env)
    output_dir = Path(args.output_dir or f"outputs/{args.run_name or name.rpartition('/')[2]}")
    functions = FunctionFiles(output_dir)
    if inspect.isfunction(env):
        try:
            inspect.signature(env).bind(**env_args)
        except TypeError as exc:
            raise ConfigError(f"env_args: {env.__name__!r} cannot be called with them: {exc}") from exc
    table = {"id": env, "name": name.rpartition("/")[2], "args": dict(env_args)}
    if task is not None:
        table |= make_environment(task, args, functions)
    elif not isinstance(env, str):
        table["id"] = functions.path_of(env, argument="env")
    written = {key: value for key, value in written_values(args).items() if key in VfTrainerArgs.model_fields}
    if args.deterministic:
        written.setdefault(
            "bf16", False
        )  # a deterministic run computes in float32; without the key the dialect chooses by the device
    dialect = {
        "model": str(model),
        "env": {"id": name, "args": dict(env_args)},
        "inference": {
            "gpus": len(args.inference_gpu_ids or [0]),
            **({"args": {"enable_auto_tool_choice": True}} if task is not None and task.has_tools else {}),
        },
        "trainer": {"gpus": len(args.trainer_gpu_ids or [0]), "args": {**written, "output_dir": str(output_dir)}},
    }
    loaded = load_sources(VfRLConfig, [entries_of(dialect, origin=_ORIGIN)], Findings())
    run_entries = [
        *_environment_entries(table, args),
        *entries_of({key: getattr(args, key) for key in RUN_KEYS if key in args.model_fields_set}, origin=_ORIGIN),
        *entries_of(_section_keys(args.loss, functions, argument="loss"), origin=_ORIGIN, path=("trainer", "loss")),
        *entries_of(
            _section_keys(args.advantage, functions, argument="advantage"), origin=_ORIGIN, path=("orchestrator", "advantage")
        ),
    ]
    run = load_run(loaded, environ=os.environ, run_entries=run_entries)
    show_notices(run.notices)
    for configured in run.config.orchestrator.environments.values():
        if file_of(configured.package) is None:  # the file of a function is written when the run starts
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


def name_of_environment(env: Environment) -> str:
    """Return the name, in logs, metrics and paths, of an environment: its id, or a name from the function that makes it."""
    if isinstance(env, str):
        return env
    name = name_of(env, default="environment")
    if name != LOADER:
        return name.removeprefix("load_").replace("_", "-")
    file = getattr(without_partial(env), "__globals__", {}).get("__file__")
    return Path(file).stem if file else "notebook"


def _require_environment(env: Environment | None, task: RewardTask | None, args: RLArguments) -> Environment:
    """Return the environment, or the name of the one that a task becomes: that of its first function."""
    if task is not None:
        if env is not None:
            raise ConfigError("env and reward_funcs exclude each other: reward_funcs with train_dataset are the environment")
        if args.eval_strategy == "steps" and task.eval_dataset is None:
            raise ConfigError('eval_strategy "steps" needs eval_dataset')
        first = next(iter([task.reward_funcs] if callable(task.reward_funcs) else task.reward_funcs or []), None)
        return name_of_environment(first) if callable(first) else "rewards"
    if not (isinstance(env, str) or callable(env)):
        raise ConfigError(
            f"env must be the id of an environment or a function that returns one, got an object of type {type(env).__name__}: "
            "other processes make it; without an environment, give reward_funcs and train_dataset"
        )
    return env


def _environment_entries(table: Mapping[str, Any], args: RLArguments) -> list[Entry]:
    """Return the run's entries for an environment in a file. One that is an id needs none: the dialect has a key for it."""
    if file_of(table["id"]) is None:
        return []
    paths = [("orchestrator", "env"), *([("orchestrator", "eval", "env")] if args.eval_strategy == "steps" else [])]
    return [Entry(path=key_path, value=[dict(table)], origin="RLTrainer") for key_path in paths]


def _section_keys(value: Any, functions: FunctionFiles, *, argument: str) -> dict[str, Any]:
    """Return the keys of the section of a loss or an advantage, which is given as its type, a table, its model or a function."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"type": "none" if value == "None" else value}
    if not callable(value):
        return dict(value) if isinstance(value, dict) else written_values(value)
    return {"type": "custom", "import_path": functions.path_of(value, argument=argument)}
