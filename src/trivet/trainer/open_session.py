"""Begins and ends a `Session`: loads the model and a checkpoint, and waits for the last writes. Called by the RL loop and `sft`."""

import gc
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import torch

from trivet.checkpoints.commit import TRAINER, discard_checkpoints_after, discard_staging, verify_checkpoint
from trivet.checkpoints.resume import choose_start, settle_schedules
from trivet.checkpoints.run_record import AttemptGuard
from trivet.checkpoints.settings import DataRecord, compare_data
from trivet.config.layout import RunLayout
from trivet.config.schema.sft import SftConfig
from trivet.config.schema.shared import RunIdentity
from trivet.config.schema.trainer import ConstantSchedule, TrainerConfig, TrainingConfig
from trivet.telemetry.telemetry import Telemetry
from trivet.trainer.checkpoint.state import TrainerProgress, load_part, progress_to_resume
from trivet.trainer.disk_budget import measure_sizes, require_budget
from trivet.trainer.losses.choice import CovLossConfig
from trivet.trainer.losses.terms import Loss
from trivet.trainer.measurement.profiling import Profiler
from trivet.trainer.model.export import Exporter, load_tokenizer, require_known_tokens
from trivet.trainer.model.policy_model import load_policy, torch_dtype
from trivet.trainer.optim.host_state import keep_state_on_host
from trivet.trainer.optim.optimizer import LearningRate, make_optimizer
from trivet.trainer.ranks.world import World, barrier
from trivet.trainer.session import Session
from trivet.trainer.step import Learner
from trivet.weights.catalog import discard_policies_after
from trivet.wire.events import Start, Stop
from trivet.wire.versions import PolicyVersion, Step

logger = logging.getLogger(__name__)


def make_learner(config: TrainingConfig, world: World, *, loss: Loss, max_steps: int | None) -> Learner:
    """Load the start model, and make an optimizer that has taken no step. A schedule ends at step `max_steps`. Collective."""
    model = load_policy(config.model, world, keeps_dropout=isinstance(config, SftConfig))
    return Learner(
        model=model,
        optimizer=make_optimizer(model.trained_parameters, config.optim, matrices=model.hidden_matrices),
        learning_rate=LearningRate(peak=config.optim.lr, schedule=config.scheduler, max_steps=max_steps),
        loss=loss,
        max_norm=config.optim.max_norm,
        micro_batch_tokens=config.micro_batch_tokens,
        # In a run of `rl`, which has an identity, the user writes the trainer's keys below `trainer.`.
        key_prefix="" if config.run == RunIdentity() else "trainer.",
        world=world,
        choice=config.loss if isinstance(config, TrainerConfig) and isinstance(config.loss, CovLossConfig) else None,
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
    """Load the model, restore the checkpoint if one is configured, and remove what later steps wrote. Collective.

    After a block without an error it waits until the last policy is published and the last checkpoint is committed.

    Args:
        keep_recent, reference_interval: see `Session`.
        data: see `Session`; compared with the records in the checkpoint that is resumed.
    """
    layout = RunLayout(config.output_dir)
    from_step = choose_start(config, is_whole_verified=True)
    config = settle_schedules(config, step=from_step)
    if from_step and data:
        strict_key = "strict_data" if isinstance(config, SftConfig) and config.strict_data else None
        compare_data(layout.checkpoint_step(from_step) / TRAINER, data, step=from_step, strict_key=strict_key)
    torch.manual_seed(config.seed)
    profiler = Profiler(config, world)
    schedule_end = config.max_steps if isinstance(config.scheduler, ConstantSchedule) else config.scheduler.total_steps
    learner = make_learner(config, world, loss=loss, max_steps=schedule_end)
    tokenizer = load_tokenizer(config)
    require_known_tokens(tokenizer, learner.model, config)
    if config.model.optim_cpu_offload:
        keep_state_on_host(learner.optimizer, world.device)
    progress = _restore(config, layout, learner, from_step) if from_step else TrainerProgress()
    sizes = measure_sizes(learner.model, config)
    telemetry = None
    if world.is_main:
        # Remove what an earlier attempt wrote. The orchestrator of this attempt writes no part before this process answers it.
        discard_checkpoints_after(layout, from_step)
        discard_staging(layout)
        discard_policies_after(layout, PolicyVersion(from_step))
        require_budget(config, layout, sizes, from_step=from_step, keep_recent=keep_recent)
        telemetry = Telemetry(role, config, resume_step=from_step, check=AttemptGuard(layout, config.run).check)
        telemetry.write_event(Start(run_id=config.run.id, from_step=from_step))
    barrier(world)
    session = Session(
        config=config,
        layout=layout,
        learner=learner,
        progress=progress,
        from_step=from_step,
        telemetry=telemetry,
        exporter=Exporter(
            model=learner.model,
            tokenizer=tokenizer,
            dtype=torch_dtype(config.model.compute_dtype),
            is_sharded=config.ckpt.weights.save_sharded,
        ),
        profiler=profiler,
        sizes=sizes,
        keep_recent=keep_recent,
        reference_interval=reference_interval,
        data=data or {},
    )
    reason = "failed"
    gc.collect()
    gc.freeze()  # later collections skip the loaded objects, which live until the end
    try:
        yield session
        session.settle(does_wait=True)
        reason = session.ending
    finally:
        gc.unfreeze()
        session.close()
        if telemetry is not None:
            try:
                telemetry.write_event(Stop(step=Step(session.progress.step), reason=reason))
            except OSError as exc:  # this error must not replace the one that ends the run
                if reason != "failed":
                    raise
                logger.warning("the end of the run is not in its history: %s", exc)
            finally:
                telemetry.close()


def _restore(config: TrainingConfig, layout: RunLayout, learner: Learner, step: Step) -> TrainerProgress:
    """Give `learner` the state of checkpoint `step`, and return the progress to continue from. Collective."""
    if learner.world.is_main:
        verify_checkpoint(layout, step)
    barrier(learner.world)
    saved = load_part(layout.checkpoint_step(step) / TRAINER, learner, skip_optimizer=config.ckpt.skip_optimizer)
    progress = progress_to_resume(saved, config.ckpt)
    learner.learning_rate = replace(learner.learning_rate, start=progress.schedule_start)
    logger.info("resumed step=%s total_tokens=%s", step, progress.total_tokens)
    return progress
