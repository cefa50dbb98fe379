"""Begins and ends a `Session`: reads what a start or a resume needs, and has everything on disk before the rank ends."""

import gc
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch

from trivet.checkpoints.commit import discard_checkpoints_after, discard_staging, removable_steps, verify_checkpoint
from trivet.checkpoints.data_record import DataRecord, compare_data
from trivet.checkpoints.parts import TRAINER
from trivet.checkpoints.resume import choose_start, settle_schedules
from trivet.checkpoints.run_record import AttemptGuard
from trivet.config.layout import RunLayout
from trivet.config.schema.sft import SftConfig
from trivet.config.schema.shared import CkptConfig, RunIdentity
from trivet.config.schema.trainer import ConstantSchedule, TrainingConfig
from trivet.key_names import key_name
from trivet.storage.disk import format_bytes, free_bytes, require_free_space
from trivet.telemetry.telemetry import Telemetry, TelemetryOutputs
from trivet.trainer.checkpoint.saver import CheckpointSaver
from trivet.trainer.checkpoint.state import TrainerProgress, load_part, progress_to_resume
from trivet.trainer.losses.terms import Loss
from trivet.trainer.measurement.profiling import Profiler
from trivet.trainer.model.export import Exporter, load_tokenizer, require_known_tokens
from trivet.trainer.model.policy_model import PolicyModel, load_policy, torch_dtype
from trivet.trainer.optim.host_state import keep_state_on_host
from trivet.trainer.optim.optimizer import LearningRate, make_optimizer, state_bytes
from trivet.trainer.policies import Policies
from trivet.trainer.ranks.world import World, barrier
from trivet.trainer.session import Session
from trivet.trainer.step import Learner
from trivet.weights.catalog import discard_policies_after
from trivet.wire.events import Start, Stop
from trivet.wire.versions import PolicyVersion, Step

logger = logging.getLogger(__name__)


def make_learner(config: TrainingConfig, world: World, *, loss: Loss, max_steps: int | None) -> Learner:
    """Load the start model, and make an optimizer that has taken no step. Collective.

    Args:
        max_steps: the step at which the learning-rate schedule ends.
    """
    model = load_policy(config.model, world, keeps_dropout=isinstance(config, SftConfig))
    return Learner(
        model=model,
        optimizer=make_optimizer(model.trained_parameters, config.optim, matrices=model.hidden_matrices),
        learning_rate=LearningRate(peak=config.optim.lr, schedule=config.scheduler, max_steps=max_steps),
        loss=loss,
        max_norm=config.optim.max_norm,
        micro_batch_tokens=config.micro_batch_tokens,
        # In a run the trainer's keys are a part of the run's.
        key_prefix="" if config.run == RunIdentity() else "trainer.",
        world=world,
    )


@contextmanager
def open_session(
    config: TrainingConfig,
    world: World,
    *,
    loss: Loss,
    role: Literal["trainer", "sft"],
    keep_recent: int,
    reference_interval: int | None = None,
    data: Mapping[str, DataRecord] | None = None,
) -> Iterator[Session]:
    """Load the model, go back to the checkpoint if one is asked for, and clear away what came after it. Collective.

    Leaves the block once the last policy is published and the last checkpoint committed.

    Args:
        keep_recent: policies that stay besides the newest.
        reference_interval: steps after which the loss takes the published policy as its reference.
        data: what is trained on, compared with the checkpoint that is resumed and kept in later ones.

    Raises:
        ResumeError: the data differ from those of the checkpoint, and `strict_data` refuses that.
        ConfigError: no such model; or a fresh start over committed checkpoints.
        CheckpointError: the step to resume from is not there, or damaged; or a checkpoint could not be written.
        DiskFull: the disk is too full for what the run must write.
    """
    layout = RunLayout(config.output_dir)
    from_step = choose_start(config, is_whole_verified=True)
    config = settle_schedules(config, step=from_step)
    if from_step and data:
        strict_key = "strict_data" if isinstance(config, SftConfig) and config.strict_data else None
        compare_data(layout.checkpoint_step(from_step) / TRAINER, data, step=from_step, strict_key=strict_key)
    torch.manual_seed(config.seed)
    profiler = Profiler(config, world)
    end = config.max_steps if isinstance(config.scheduler, ConstantSchedule) else config.scheduler.total_steps
    learner = make_learner(config, world, loss=loss, max_steps=end)
    tokenizer = load_tokenizer(config)
    require_known_tokens(tokenizer, learner.model, config)
    progress = _restore(config, layout, learner, from_step)
    sizes = measure_sizes(learner.model, config)
    telemetry = None
    if world.is_main:
        # What an earlier attempt wrote after the step. The orchestrator's part is not begun before this process answers.
        discard_checkpoints_after(layout, from_step)
        discard_staging(layout)
        discard_policies_after(layout, PolicyVersion(from_step))
        require_budget(config, layout, sizes, from_step=from_step, keep_recent=keep_recent)
        telemetry = Telemetry(
            role,
            layout=layout,
            run=config.run,
            detectors=config.detectors,
            outputs=TelemetryOutputs(wandb=config.wandb, heartbeat=config.heartbeat, metrics_server=config.metrics_server),
            resume_step=from_step,
            check=AttemptGuard(layout, config.run).check,
        )
        telemetry.write_event(Start(run_id=config.run.id, from_step=from_step))
    barrier(world)
    exporter = Exporter(
        model=learner.model,
        tokenizer=tokenizer,
        dtype=torch_dtype(config.model.compute_dtype),
        is_sharded=config.ckpt.weights.save_sharded,
    )
    session = Session(
        config=config,
        layout=layout,
        world=world,
        learner=learner,
        progress=progress,
        from_step=from_step,
        telemetry=telemetry,
        policies=Policies(
            config=config,
            layout=layout,
            learner=learner,
            exporter=exporter,
            telemetry=telemetry,
            num_bytes=sizes.weights,
            from_step=from_step,
            keep_recent=keep_recent,
            reference_interval=reference_interval,
        ),
        checkpoints=CheckpointSaver(
            config=config, layout=layout, world=world, num_bytes=sizes.checkpoint, telemetry=telemetry, data=data or {}
        ),
        profiler=profiler,
    )
    reason = "failed"
    try:
        with _loaded_objects_frozen():
            yield session
            session.settle(does_wait=True)
            reason = session.ending
    finally:
        session.close()
        if telemetry is not None:
            try:
                telemetry.write_event(Stop(step=Step(session.progress.step), reason=reason))
            except OSError as exc:  # it does not replace the error that the run ends for
                if reason != "failed":
                    raise
                logger.warning("the end of the run is not in its history: %s", exc)
            finally:
                telemetry.close()


def _restore(config: TrainingConfig, layout: RunLayout, learner: Learner, step: Step) -> TrainerProgress:
    """Give `learner` the state of checkpoint `step`, if that is not 0, and return the progress to continue from. Collective."""
    if config.model.optim_cpu_offload:
        keep_state_on_host(learner.optimizer, learner.world.device)
    if not step:
        return TrainerProgress()
    if learner.world.is_main:
        verify_checkpoint(layout, step)
    barrier(learner.world)
    saved = load_part(layout.checkpoint_step(step) / TRAINER, learner, skip_optimizer=config.ckpt.skip_optimizer)
    progress = progress_to_resume(saved, config.ckpt)
    learner.learning_rate = replace(learner.learning_rate, start=progress.schedule_start)
    logger.info("resumed step=%s total_tokens=%s", step, progress.total_tokens)
    return progress


@contextmanager
def _loaded_objects_frozen() -> Iterator[None]:
    """Exempt what was loaded from garbage collection: it stays, so no collection has to look at it again."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes of one checkpoint and of one policy, sidecar files aside."""

    checkpoint: int
    weights: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskEstimate:
    """Bytes that a run will take."""

    minimum: int
    """Bytes without which not even the first checkpoint can be committed."""
    total: int | None
    """Bytes at the end of the run; None when it has no end."""


def estimate(ckpt: CkptConfig, sizes: Sizes, *, from_step: int, max_steps: int | None, keep_recent: int) -> DiskEstimate:
    """Estimate from the sizes of one checkpoint and one policy.

    Args:
        from_step: the last step done.
        keep_recent: policies that stay besides the newest, for servers that lag.
    """
    # One more while the next is being written, which makes one superfluous only when it is there.
    policies = keep_recent + 3
    minimum = sizes.checkpoint + policies * sizes.weights
    if max_steps is None:
        return DiskEstimate(minimum=minimum, total=None)
    steps = range(from_step + 1, max_steps + 1)
    committed = [Step(step) for step in steps if ckpt.is_due(step, max_steps=max_steps)]
    removed = set(removable_steps(committed, keep_last=ckpt.keep_last, keep_interval=ckpt.keep_interval))
    kept = [step for step in committed if step not in removed]
    num_being_written = int(len(removed) > 0)
    interval = ckpt.weights.interval
    with_weights = {*kept, *(step for step in steps if interval and step % interval == 0)}
    total = (len(kept) + num_being_written) * sizes.checkpoint + (len(with_weights) + policies) * sizes.weights
    return DiskEstimate(minimum=min(minimum, total), total=total)


def measure_sizes(model: PolicyModel, config: TrainingConfig) -> Sizes:
    """Return the bytes of one checkpoint and of one policy, over all ranks.

    A checkpoint holds the trained parameters and the state of their optimizer.
    """
    parameters = model.trained_parameters
    held = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    served_dtype: torch.dtype = torch_dtype(config.model.compute_dtype)
    return Sizes(
        checkpoint=held + state_bytes(parameters, config.optim, matrices=model.hidden_matrices),
        weights=sum(parameter.numel() for parameter in parameters) * served_dtype.itemsize,
    )


def require_budget(config: TrainingConfig, layout: RunLayout, sizes: Sizes, *, from_step: int, keep_recent: int) -> None:
    """Warn if the disk will not hold all that the run is to write.

    Raises:
        DiskFull: it does not even hold the first checkpoint and its weights.
    """
    needed = estimate(config.ckpt, sizes, from_step=from_step, max_steps=config.max_steps, keep_recent=keep_recent)
    require_free_space(layout.root, needed.minimum, what="the first checkpoint and its weights")
    free = free_bytes(layout.root)
    if needed.total is None or needed.total <= free:
        return
    logger.warning(
        "the run will write %s of checkpoints (%s each) and weights (%s each), and %s are free in %s: it will stop when they "
        "are used up; set %s, or a larger %s",
        format_bytes(needed.total),
        format_bytes(sizes.checkpoint),
        format_bytes(sizes.weights),
        format_bytes(free),
        layout.root,
        key_name("ckpt.keep_last"),
        key_name("ckpt.interval"),
    )
