"""Chooses the checkpoint from which a run resumes or a new run is forked, and checks it before anything is started or removed."""

import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar, cast

from trivet.checkpoints.commit import (
    ORCHESTRATOR,
    TRAINER,
    committed_steps,
    read_record,
    resolve_resume_step,
    verify_checkpoint,
)
from trivet.checkpoints.settings import (
    CONFIG_FILE,
    describe_changes,
    find_changed_measurements,
    find_schedule_lengths,
    flatten_config,
    read_settings,
    require_same_settings,
)
from trivet.config.check_roles import steps_problem
from trivet.config.layout import COMMITTED, STABLE, RunLayout
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.shared import SteppingRoleConfig
from trivet.errors import CheckpointError, ConfigError, ResumeError
from trivet.key_names import key_name
from trivet.storage.durable import list_files, remove_directory, sync_directory, sync_tree
from trivet.wire.versions import Step

logger = logging.getLogger(__name__)

ConfigT = TypeVar("ConfigT", bound=SteppingRoleConfig)


def choose_start(config: SteppingRoleConfig, *, is_whole_verified: bool = False) -> Step:
    """Return the step that a role starts from: the step to resume, or 0 for a fresh start, which must find no checkpoint."""
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


def choose_resume_step(config: SteppingRoleConfig, *, is_whole_verified: bool = False) -> Step | None:
    """Return the step that `config` resumes from, or None. An orchestrator verifies its own part, a trainer every file.

    Args:
        is_whole_verified: the caller has verified every file, or will; only the settings are compared.
    """
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
    if name not in read_record(layout, step).parts:
        raise CheckpointError(f"{layout.checkpoint_step(step)} has no part of the {name}: it was written without one")
    if not is_whole_verified:
        verify_checkpoint(layout, step, only=name if name == ORCHESTRATOR else None)
    require_same_settings(layout.checkpoint_step(step) / name, config, ckpt=config.ckpt, step=step)
    if problem := steps_problem(config.max_steps, resume_step=step):
        raise ResumeError(problem)
    return step


def settle_schedules(config: ConfigT, *, step: Step) -> ConfigT:
    """Return `config` with the step at which each schedule ends, which the checkpoints of the run then keep.

    Log schedules that keep their end although max_steps has changed, and evaluations whose scores are no longer comparable.

    Args:
        step: the step that the role starts from, checked by `choose_resume_step`; 0: every schedule begins.
    """
    now, max_steps = flatten_config(config), config.max_steps
    part = RunLayout(config.output_dir).checkpoint_step(step) / _part_name(config)
    saved = read_settings(part / CONFIG_FILE) if step else None
    for key, length in find_schedule_lengths(now, saved=saved).items():
        config = _with_value(config, key.split("."), length)
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
        for line in describe_changes(find_changed_measurements(saved, now, defaults=flatten_config(type(config)()))):
            logger.warning("scores from step %s on are not comparable with earlier ones: %s", step + 1, line)
    return config


def _part_name(config: SteppingRoleConfig) -> str:
    return ORCHESTRATOR if isinstance(config, OrchestratorConfig) else TRAINER


def _with_value(value: Any, path: list[str], new: object) -> Any:
    """Return a copy of a section, or of a list of sections, with the value `new` at `path`: names of keys, or indices of a list."""
    if not path:
        return new
    name, *rest = path
    if isinstance(value, list):
        items = cast("list[Any]", value).copy()
        items[int(name)] = _with_value(items[int(name)], rest, new)
        return items
    return value.model_copy(update={name: _with_value(getattr(value, name), rest, new)})


def choose_fork(layout: RunLayout, *, source: Path, resume_step: int | None) -> Step:
    """Return the step of the run in `source` from which a new run is forked, after verifying the checkpoint. Changes no file.

    Args:
        layout: the directory of the new run.
        source, resume_step: the values of ckpt.resume_from and ckpt.resume_step; None: the newest step.
    """
    if source.resolve() == layout.root.resolve():
        raise ResumeError(
            f"ckpt.resume_from = {str(source)!r} is the run's own output_dir; to go on with it set "
            f"{key_name('ckpt.resume_step')} alone, for a new run choose another output_dir"
        )
    other = RunLayout(source)
    step = resolve_resume_step(other, -1 if resume_step is None else resume_step)
    verify_checkpoint(other, step)
    return step


def adopt(source_dir: Path, step: Step, *, into: RunLayout, versions: Iterable[int] = ()) -> None:
    """Make checkpoint `step` of the run in `source_dir` the first checkpoint of the run in `into`. The source does not change.

    Args:
        versions: published policies to take over, if they still exist. The trainer publishes the policy of `step` again.
    """
    assert not committed_steps(into), f"{into.root} has checkpoints of its own"
    source = RunLayout(source_dir)
    for version in versions:
        if (source.weights_step(version) / STABLE).exists():
            _share_directory(source.weights_step(version), into.weights_step(version), marker=STABLE)
    _share_directory(source.checkpoint_step(step), into.checkpoint_step(step), marker=COMMITTED)
    verify_checkpoint(into, step)


def _share_directory(source: Path, final: Path, *, marker: str) -> None:
    """Make the directory `final` equal to `source`. Its marker comes last, when all other files are on disk."""
    staging = final.with_name(f".{final.name}.tmp")
    remove_directory(staging)
    for name in list_files(source):
        if name != marker:
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            _link_or_copy(source / name, staging / name)
    sync_tree(staging)
    remove_directory(final)
    staging.rename(final)
    sync_directory(final.parent)
    _link_or_copy(source / marker, final / marker)
    sync_directory(final)


def _link_or_copy(source: Path, target: Path) -> None:
    """Make `target` a hard link to `source` if possible: files of checkpoints and policies are never written again."""
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
