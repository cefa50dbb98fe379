"""One rank's part of a training run: the learner, and everything durable around it. Used by the RL loop and by `sft`.

Methods that say collective are called by every rank; files are written by rank 0 alone, except sharded checkpoints.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch

from trivet.checkpoints.commit import (
    commit,
    committed_steps,
    discard_later,
    resolve_resume_step,
    verify_checkpoint,
)
from trivet.checkpoints.halves import TRAINER, begin_half, finish_half, staging_directory
from trivet.checkpoints.retention import removable_steps, remove_checkpoint
from trivet.config.layout import RunLayout
from trivet.config.trainer import TrainingConfig
from trivet.errors import ConfigError
from trivet.telemetry.stats import summarize
from trivet.telemetry.telemetry import Telemetry
from trivet.trainer.checkpoint import Progress, load_half, save_half
from trivet.trainer.distributed import World, barrier
from trivet.trainer.export import Exporter, load_tokenizer
from trivet.trainer.losses import Loss
from trivet.trainer.model import load_policy
from trivet.trainer.optimizer import LearningRate, make_optimizer
from trivet.trainer.performance import ModelCost, model_cost, speed_metrics
from trivet.trainer.step import Learner, StepResult
from trivet.weights.catalog import discard_after, published_versions
from trivet.weights.publish import publish
from trivet.weights.retention import reader_versions, retirable, retire
from trivet.wire.batches import MicroBatch
from trivet.wire.events import Commit, Publish, Retire, Start, Stop
from trivet.wire.versions import PolicyVersion, Step

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Session:
    config: TrainingConfig
    layout: RunLayout
    world: World
    learner: Learner
    exporter: Exporter
    cost: ModelCost
    progress: Progress
    telemetry: Telemetry | None
    """On rank 0."""
    from_step: Step
    """The step resumed from, 0 for a fresh run."""
    times: dict[str, float] = field(default_factory=dict)
    """Seconds of the current step, by metric name."""

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.times[f"time/{name}"] = time.monotonic() - started

    def publish(self, step: Step) -> None:
        """Publish the weights as the policy of `step`. Collective."""
        with self.timed("broadcast_weights"):
            weights = self.exporter.gather(keep=self.world.is_main)
            if self.telemetry is None:
                return
            manifest = publish(
                self.layout,
                version=PolicyVersion(step),
                run_id=self.config.run.id,
                write=lambda directory: self.exporter.write(directory, weights),
            )
            self.telemetry.write_event(Publish(version=manifest.version, digest=manifest.digest))
        logger.info("policy published version=%s digest=%s", step, manifest.digest[:12])

    def save(self, step: Step, *, halves: Sequence[str]) -> None:
        """Write the trainer's half of checkpoint `step` and commit it together with the other `halves`. Collective."""
        with self.timed("save_ckpt"):
            if self.world.is_main:
                begin_half(self.layout, step, TRAINER)
            barrier(self.world)
            save_half(staging_directory(self.layout, step) / TRAINER, self.learner, self.progress)
            barrier(self.world)
            if self.telemetry is None:
                return
            finish_half(self.layout, step, TRAINER)
            self.telemetry.sync_events()
            commit(self.layout, step, halves=halves)
            self.telemetry.write_event(Commit(step=step))
        logger.info("checkpoint committed step=%s", step)

    def remove_old(self, *, keep_recent: int) -> None:
        """Apply retention to checkpoints, then to the policies that neither they nor readers need."""
        if self.telemetry is None:
            return
        ckpt = self.config.ckpt
        for step in removable_steps(committed_steps(self.layout), keep_last=ckpt.keep_last, keep_interval=ckpt.keep_interval):
            remove_checkpoint(self.layout, step)
        published = published_versions(self.layout)
        for version in retirable(
            published,
            latest=max(published),
            keep_recent=keep_recent,
            in_use=list(reader_versions(self.layout).values()),
            kept=[*committed_steps(self.layout), self.from_step],
        ):
            retire(self.layout, version)
            self.telemetry.write_event(Retire(version=version))

    def report(
        self, step: Step, result: StepResult, rows: Sequence[MicroBatch], *, extra: Mapping[str, float] | None = None
    ) -> None:
        """The metrics and the console line of a finished step; its times start anew."""
        seconds = self.times.pop("time/step")
        metrics: dict[str, float] = {}
        for name, values in result.values.items():
            metrics |= summarize(name, values)
        metrics |= {
            "loss/mean": result.loss,
            "optim/lr": result.lr,
            "optim/grad_norm": result.grad_norm,
            "time/step": seconds,
            "time/forward_backward": result.forward_backward_s,
            "time/optimizer": result.optimizer_s,
            "progress/total_tokens": self.progress.total_tokens,
            "progress/total_samples": self.progress.total_samples,
        }
        metrics |= self.times
        metrics |= speed_metrics(self.cost, rows, seconds=seconds, num_ranks=self.world.size, device=self.world.device)
        self.times.clear()
        if self.telemetry is not None:
            self.telemetry.write_step(step, metrics | dict(extra or {}))


@contextmanager
def open_session(config: TrainingConfig, world: World, *, loss: Loss, role: Literal["trainer", "sft"]) -> Iterator[Session]:
    """Load the model, go back to the checkpoint if one is asked for, and clear away what came after it. Collective.

    Raises:
        ConfigError: no such model; or a fresh start over committed checkpoints.
        CheckpointError: the step to resume from is not there, or damaged.
    """
    layout = RunLayout(config.output_dir)
    learning_rate = LearningRate(peak=config.optim.lr, schedule=config.scheduler, max_steps=config.max_steps)
    from_step = _choose_start(config, layout)
    torch.manual_seed(config.seed)
    model = load_policy(config.model, world)
    learner = Learner(
        model=model,
        optimizer=make_optimizer(model.parameters(), config.optim),
        learning_rate=learning_rate,
        loss=loss,
        max_norm=config.optim.max_norm,
        world=world,
    )
    progress = _resume(layout, learner, from_step) if from_step else Progress()
    telemetry = None
    if world.is_main:
        discard_later(layout, from_step)
        discard_after(layout, PolicyVersion(from_step))
        telemetry = Telemetry(
            role,
            layout=layout,
            run=config.run,
            wandb=config.wandb,
            heartbeat=config.heartbeat,
            detectors=config.detectors,
            resume_step=from_step,
        )
        telemetry.write_event(Start(run_id=config.run.id, from_step=from_step))
    barrier(world)
    session = Session(
        config=config,
        layout=layout,
        world=world,
        learner=learner,
        exporter=Exporter(model=model, tokenizer=load_tokenizer(config), dtype=getattr(torch, config.model.compute_dtype)),
        cost=model_cost(model),
        progress=progress,
        telemetry=telemetry,
        from_step=from_step,
    )
    reason = "failed"
    try:
        yield session
        reason = "done"
    finally:
        if telemetry is not None:
            telemetry.write_event(Stop(step=Step(session.progress.step), reason=reason))
            telemetry.close()


def _choose_start(config: TrainingConfig, layout: RunLayout) -> Step:
    if config.ckpt.resume_step is None:
        if committed := committed_steps(layout):
            raise ConfigError(
                f"{layout.checkpoints} holds the committed checkpoints {', '.join(map(str, committed))}, which a fresh start "
                "would remove; set ckpt.resume_step = -1 to go on from the newest, or choose another output_dir"
            )
        return Step(0)
    step = resolve_resume_step(layout, config.ckpt.resume_step)
    if config.max_steps is not None and config.max_steps <= step:
        raise ConfigError(
            f"max_steps ({config.max_steps}) is not above the step resumed from ({step}): nothing is left to do; raise it"
        )
    return step


def _resume(layout: RunLayout, learner: Learner, step: Step) -> Progress:
    if learner.world.is_main:
        verify_checkpoint(layout, step)
    barrier(learner.world)
    progress = load_half(layout.checkpoint_step(step) / TRAINER, learner)
    logger.info("resumed step=%s total_tokens=%s", step, progress.total_tokens)
    return progress
