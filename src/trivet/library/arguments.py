"""The arguments that a program passes: keys of the documented dialect, sections of the configuration, and Python functions.

Fields and defaults are those of the configuration's models. A wrong name or value is refused where it is written, with the nearest
name, as on the command line.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from trivet.config.findings import Findings
from trivet.config.load import SectionT, load_sources
from trivet.config.schema.base import Section
from trivet.config.schema.deployment import RecoveryConfig
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.inference import InferenceConfig
from trivet.config.schema.orchestrator import AdvantageConfig, OrchestratorConfig
from trivet.config.schema.sft import SftConfig
from trivet.config.schema.shared import CkptConfig, DetectorsConfig, LogConfig, WeightsConfig
from trivet.config.schema.trainer import LossConfig, TrainerConfig
from trivet.config.schema.vf_rl import VfRLConfig, VfTrainerArgs
from trivet.config.spellings import use_current_names
from trivet.config.values import Entry
from trivet.key_names import use_names
from trivet.library.process import PYTHON_NAMES
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
    entries: list[Entry] = []
    for name, value in values.items():
        table = written_values(value) if isinstance(value, Section) else value
        if isinstance(table, dict) and table:
            entries.extend(entries_of(table, origin=origin, path=(*path, name)))
        else:
            entries.append(Entry(path=(*path, name), value=_as_data(table), origin=origin))
    return entries


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
