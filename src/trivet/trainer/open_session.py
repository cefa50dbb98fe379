"""Begins and ends a `Session`: reads what a start or a resume needs, and has everything on disk before the rank ends."""

import gc
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from trivet.algorithms.probe import convert_dtype
from trivet.checkpoints.commit import discard_checkpoints_after, discard_staging, verify_checkpoint
from trivet.checkpoints.data_record import DataRecord, compare_data
from trivet.checkpoints.parts import TRAINER
from trivet.checkpoints.resume import choose_start, settle_schedules
from trivet.checkpoints.run_record import AttemptGuard
from trivet.config.layout import RunLayout
from trivet.config.schema.sft import SftConfig
from trivet.config.schema.shared import RunIdentity
from trivet.config.schema.trainer import ConstantSchedule, TrainingConfig
from trivet.telemetry.telemetry import Telemetry, TelemetryOutputs
from trivet.trainer.background import Background
from trivet.trainer.checkpoint.part_writer import PartWriter
from trivet.trainer.checkpoint.saver import CheckpointSaver
from trivet.trainer.checkpoint.state import TrainerProgress, load_part, progress_to_resume
from trivet.trainer.disk_budget import Sizes, measure_sizes, require_budget
from trivet.trainer.losses.terms import Loss
from trivet.trainer.measurement.profiling import Profiler
from trivet.trainer.model.export import Exporter, load_tokenizer, require_known_tokens
from trivet.trainer.model.policy_model import load_policy, torch_dtype
from trivet.trainer.optim.host_state import keep_state_on_host
from trivet.trainer.optim.optimizer import LearningRate, make_optimizer
from trivet.trainer.policy_publisher import PolicyPublisher
from trivet.trainer.policy_retention import PolicyRetention
from trivet.trainer.ranks.world import World, barrier
from trivet.trainer.session import Session
from trivet.trainer.step import Learner
from trivet.trainer.step_reporter import StepReporter
from trivet.weights.catalog import discard_policies_after
from trivet.weights.retention import LiveReaders
from trivet.wire.events import Start, Stop
from trivet.wire.versions import PolicyVersion, Step

logger = logging.getLogger(__name__)

_WRITE_TIMEOUT_S = 1800.0
"""How much longer than the fastest rank the slowest may take to write a checkpoint; a longer dist_timeout_seconds wins."""


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
        _discard_after(layout, from_step)
        require_budget(config, layout, sizes, from_step=from_step, keep_recent=keep_recent)
        telemetry = _open_telemetry(config, layout, role=role, from_step=from_step)
    barrier(world)
    publisher = _make_publisher(config, layout, learner, tokenizer, telemetry, sizes)
    saver = _make_saver(config, layout, world, telemetry, sizes)
    saver.data = data or {}
    session = Session(
        layout=layout,
        world=world,
        learner=learner,
        progress=progress,
        from_step=from_step,
        telemetry=telemetry,
        publisher=publisher,
        saver=saver,
        num_probe_tokens=config.weights.probe_tokens,
        probe_dtype=convert_dtype(config.model.compute_dtype),
        retention=_make_retention(config, layout, from_step, keep_recent=keep_recent, reference_interval=reference_interval),
        reporter=StepReporter(
            world=world,
            telemetry=telemetry,
            profiler=profiler,
            background={"write_weights": publisher.work, "write_ckpt": saver.writer.work},
        ),
    )
    learner.before_update = session.release_state
    with _ending_in_order(session):
        yield session


@contextmanager
def _ending_in_order(session: Session) -> Iterator[None]:
    """Wait for the last writes after the block, then close the session and record why it ended."""
    reason = "failed"
    try:
        with _loaded_objects_frozen():
            yield
            session.settle(does_wait=True)
            reason = session.ending
    finally:
        session.close()
        if session.telemetry is not None:
            _write_stop(session.telemetry, Stop(step=Step(session.progress.step), reason=reason))


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


def _discard_after(layout: RunLayout, step: Step) -> None:
    """Remove what an earlier attempt wrote after `step`."""
    discard_checkpoints_after(layout, step)
    discard_staging(layout)  # the other part is not begun before this process answers
    discard_policies_after(layout, PolicyVersion(step))


def _open_telemetry(
    config: TrainingConfig, layout: RunLayout, *, role: Literal["trainer", "sft"], from_step: Step
) -> Telemetry:
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
    return telemetry


def _make_publisher(
    config: TrainingConfig,
    layout: RunLayout,
    learner: Learner,
    tokenizer: PreTrainedTokenizerBase,
    telemetry: Telemetry | None,
    sizes: Sizes,
) -> PolicyPublisher:
    return PolicyPublisher(
        layout=layout,
        world=learner.world,
        exporter=Exporter(
            model=learner.model,
            tokenizer=tokenizer,
            dtype=torch_dtype(config.model.compute_dtype),
            is_sharded=config.ckpt.weights.save_sharded,
        ),
        run_id=config.run.id,
        num_bytes=sizes.weights,
        telemetry=telemetry,
        work=Background("publisher", is_async=config.ckpt.async_write),
        release_memory=partial(_release_gpu_memory, learner) if config.release_gpu_memory else None,
    )


def _release_gpu_memory(learner: Learner) -> None:
    """Drop the gradients, which the next step computes anew, and give the driver all memory that torch's allocator caches."""
    learner.optimizer.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()


def _make_saver(
    config: TrainingConfig, layout: RunLayout, world: World, telemetry: Telemetry | None, sizes: Sizes
) -> CheckpointSaver:
    timeout_s = max(_WRITE_TIMEOUT_S, config.dist_timeout_seconds)
    return CheckpointSaver(
        config=config,
        layout=layout,
        world=world,
        writer=PartWriter(world, is_async=config.ckpt.async_write, timeout_s=timeout_s),
        num_bytes=sizes.checkpoint,
        telemetry=telemetry,
    )


def _make_retention(
    config: TrainingConfig, layout: RunLayout, from_step: Step, *, keep_recent: int, reference_interval: int | None
) -> PolicyRetention:
    return PolicyRetention(
        layout=layout,
        readers=LiveReaders(layout),
        from_step=from_step,
        keep_recent=keep_recent,
        # A deterministic run samples each batch from the policy that lags by exactly so many; others start from the newest.
        resume_lag=keep_recent if config.deterministic else 0,
        reference_interval=reference_interval,
        keep_interval=config.ckpt.weights.interval,
    )


@contextmanager
def _loaded_objects_frozen() -> Iterator[None]:
    """Exempt what was loaded from garbage collection: it stays, so no collection has to look at it again."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _write_stop(telemetry: Telemetry, stop: Stop) -> None:
    """Write the last event. What the writing meets does not replace the error that the run ends for."""
    try:
        telemetry.write_event(stop)
    except OSError as exc:
        if stop.reason != "failed":
            raise
        logger.warning("the end of the run is not in its history: %s", exc)
    finally:
        telemetry.close()
