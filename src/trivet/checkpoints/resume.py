"""Checks what must hold before a run goes back to a checkpoint, before anything is started or removed."""

import logging
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

from trivet.checkpoints.commit import committed_steps, read_record, resolve_resume_step, verify_checkpoint, verify_part
from trivet.checkpoints.parts import ORCHESTRATOR, TRAINER
from trivet.checkpoints.settings import (
    CONFIG_FILE,
    describe,
    other_measurements,
    read_settings,
    require_same_settings,
    unset_lengths,
    values_of,
)
from trivet.config.check_roles import steps_problem
from trivet.config.layout import RunLayout
from trivet.config.schema.base import Section
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.shared import CkptConfig
from trivet.errors import CheckpointError, ConfigError, ResumeError
from trivet.key_names import key_name
from trivet.wire.versions import Step

logger = logging.getLogger(__name__)

SectionT = TypeVar("SectionT", bound=Section)


@runtime_checkable
class Resumable(Protocol):
    """A role's configuration that may name a step to resume from."""

    @property
    def output_dir(self) -> Path:
        """The run's directory."""
        ...

    @property
    def max_steps(self) -> int | None:
        """The last step of the run; None: it has no end."""
        ...

    @property
    def ckpt(self) -> CkptConfig:
        """Settings that say whether, and where from, the role resumes."""
        ...


def require_resumable(config: Resumable) -> None:
    """Run `choose_start` as a command's check, before it starts anything."""
    choose_start(config)


def choose_start(config: Resumable, *, is_whole_verified: bool = False) -> Step:
    """Return the step that a role starts from: `choose_resume_step`'s, or 0 for a fresh start.

    Raises:
        ConfigError: a fresh start over committed checkpoints.
    """
    step = choose_resume_step(config, is_whole_verified=is_whole_verified)
    if step is not None:
        return step
    layout = RunLayout(config.output_dir)
    if committed := committed_steps(layout):
        raise ConfigError(
            f"{layout.checkpoints} holds the committed checkpoints {', '.join(map(str, committed))}, which a fresh start "
            f"would remove; set {key_name('ckpt.resume_step = -1')} to go on from the newest, or choose another output_dir"
        )
    return Step(0)


def choose_resume_step(config: Resumable, *, is_whole_verified: bool = False) -> Step | None:
    """Return the step that `config` resumes from, checked. An orchestrator reads its own part alone, a trainer every file.

    Args:
        config: a role's, with its own values of the keys.
        is_whole_verified: every file was read already; only the settings are compared.

    Returns:
        The step, None for a fresh start.

    Raises:
        ResumeError: the step is not there, or settings that may not change did.
        CheckpointError: the checkpoint is of another version, or damaged.
    """
    assert isinstance(config, Section)
    if config.ckpt.resume_from is not None:
        raise ResumeError(
            f"ckpt.resume_from = {str(config.ckpt.resume_from)!r} starts a new run with all its roles: give it to `rl`, or to "
            f"`sft`; a role alone takes {key_name('ckpt.resume_step')}"
        )
    if config.ckpt.resume_step is None:
        return None
    layout = RunLayout(config.output_dir)
    step = resolve_resume_step(layout, config.ckpt.resume_step)
    name = _part_name(config)
    record = read_record(layout, step)
    if name not in record.parts:
        raise CheckpointError(f"{layout.checkpoint_step(step)} has no part of the {name}: it was written without one")
    if not is_whole_verified:
        if name == ORCHESTRATOR:
            verify_part(layout, record, name)
        else:
            verify_checkpoint(layout, step)
    require_same_settings(layout.checkpoint_step(step) / name, config, ckpt=config.ckpt, step=step)
    if problem := steps_problem(config.max_steps, resume_step=step):
        raise ResumeError(problem)
    return step


def settle_schedules(config: SectionT, *, step: Step) -> SectionT:
    """Return `config` with the step at which each schedule ends, to be kept in the checkpoints of the run.

    Logs a schedule that goes on as it was although max_steps is another, and evaluations that measure something else.

    Args:
        step: the step that the role starts from, checked by `choose_resume_step`; 0: every schedule begins.
    """
    assert isinstance(config, Resumable)
    now, max_steps = values_of(config), config.max_steps
    part = RunLayout(config.output_dir).checkpoint_step(step) / _part_name(config)
    saved = read_settings(part / CONFIG_FILE) if step else None
    for key, length in unset_lengths(now, saved=saved).items():
        config = _with_value(config, tuple(key.split(".")), length)
        if saved is not None and max_steps is not None and max_steps != length:
            logger.warning(
                "%s = %s is kept from the checkpoint although max_steps is %s now: %s. To change it set it, and name it in %s",
                key_name(key),
                length,
                max_steps,
                "the schedule stays at its last value after that step" if length < max_steps else "the run ends before",
                key_name("ckpt.allow_changes"),
            )
    if saved is not None:
        for line in describe(other_measurements(saved, now, defaults=values_of(type(config)()))):
            logger.warning("scores from step %s on are not comparable with earlier ones: %s", step + 1, line)
    return config


def _part_name(config: Resumable) -> str:
    return ORCHESTRATOR if isinstance(config, OrchestratorConfig) else TRAINER


def _with_value(value: Any, path: tuple[str, ...], new: object) -> Any:
    """Return a copy of a section, or of a list of sections, with another value at `path`."""
    if not path:
        return new
    name, *rest = path
    if isinstance(value, list):
        items = cast("list[Any]", value).copy()
        items[int(name)] = _with_value(items[int(name)], tuple(rest), new)
        return items
    return value.model_copy(update={name: _with_value(getattr(value, name), tuple(rest), new)})
