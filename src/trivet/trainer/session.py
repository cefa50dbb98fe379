"""One rank's part of a training run: the learner, and everything durable around it. Used by the RL loop and by `sft`.

Methods that say collective are called by every rank; files are written by rank 0 alone, except sharded checkpoints.
"""

import gc
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from trivet.checkpoints.budget import Sizes
from trivet.checkpoints.commit import (
    commit,
    committed_steps,
    discard_later,
    verify_checkpoint,
)
from trivet.checkpoints.halves import TRAINER, begin_half, finish_half, staging_directory
from trivet.checkpoints.resume import choose_resume_step
from trivet.checkpoints.retention import removable_steps, remove_checkpoint
from trivet.checkpoints.settings import write_settings
from trivet.config.layout import RunLayout
from trivet.config.shared import RunIdentity
from trivet.config.trainer import TrainingConfig
from trivet.disk import explaining_full_disk, require_room
from trivet.durable import FileRecord
from trivet.errors import ConfigError
from trivet.faults import reach
from trivet.telemetry.stats import summarize
from trivet.telemetry.telemetry import Telemetry
from trivet.trainer.background import Background
from trivet.trainer.checkpoint import Progress, begin_anew, load_half, state_of
from trivet.trainer.disk_budget import measure_sizes, require_budget
from trivet.trainer.distributed import World, barrier
from trivet.trainer.export import Exporter, load_tokenizer
from trivet.trainer.half_writer import HalfWriter
from trivet.trainer.host_state import keep_state_on_host, return_state
from trivet.trainer.losses.terms import Loss
from trivet.trainer.model import load_policy
from trivet.trainer.optimizer import LearningRate, make_optimizer
from trivet.trainer.performance import ModelCost, model_cost, speed_metrics
from trivet.trainer.profiling import Profiler
from trivet.trainer.reference import reference_version
from trivet.trainer.step import Learner, StepResult
from trivet.weights.catalog import discard_after, published_versions
from trivet.weights.manifest import Manifest
from trivet.weights.publish import publish
from trivet.weights.retention import needed_to_resume, reader_versions, retirable, retire
from trivet.wire.batches import MicroBatch
from trivet.wire.events import Commit, Publish, Retire, Start, Stop
from trivet.wire.versions import PolicyVersion, Step

logger = logging.getLogger(__name__)

_WRITE_TIMEOUT_S = 1800.0
"""A rank's disk may be slower than another's by this much."""


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
    keep_recent: int
    """Policies that stay besides the newest, for servers that lag by design."""
    reference_interval: int | None
    """Steps after which the reference policy is renewed; None: it is not a published one."""
    publisher: Background
    writer: HalfWriter
    sizes: Sizes
    profiler: Profiler
    ending: str = "done"
    """What the Stop event says when no error ended the session."""
    being_written: Step | None = None
    """The newest step whose checkpoint was begun."""
    times: dict[str, float] = field(default_factory=dict)
    """Seconds of the current step, by metric name."""

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.times[f"time/{name}"] = time.monotonic() - started

    def publish(self, step: Step) -> None:
        """Publish the weights as the policy of `step`. Collective.

        Returns once they are copied, unless ckpt.async_write is off; the files are written while the next step runs.

        Raises:
            DiskFull: there is no room for them, or was none for the policy before.
        """
        with self.timed("broadcast_weights"):
            self.publisher.wait()
            weights = self.exporter.gather(keep=self.world.is_main)
            if self.world.is_main:
                require_room(self.layout.weights, self.sizes.weights, what=f"policy {step}")
                self.publisher.start(lambda: self._publish(step, weights))

    def _publish(self, step: Step, weights: dict[str, torch.Tensor]) -> None:
        with explaining_full_disk(self.layout.weights, what=f"policy {step}", num_bytes=self.sizes.weights):
            manifest = publish(
                self.layout,
                announce=self._announce,
                version=PolicyVersion(step),
                run_id=self.config.run.id,
                write=lambda directory: self.exporter.write(directory, weights),
            )
        logger.info("policy published version=%s digest=%s", step, manifest.digest[:12])

    def await_policy(self) -> None:
        """Returns once the policy that is being published can be read; raises what its publication met. Collective: ranks that
        went on alone would wait for rank 0 where less time is allowed, or end before it has written the last good weights."""
        started = time.monotonic()
        self.publisher.wait()
        barrier(self.world)
        self._add_time("wait_for_policy", time.monotonic() - started)

    def _announce(self, manifest: Manifest) -> None:
        assert self.telemetry is not None
        self.telemetry.write_event(Publish(version=manifest.version, digest=manifest.digest))

    def save(self, step: Step, *, halves: Sequence[str]) -> None:
        """Write the trainer's half of checkpoint `step` and commit it together with the other `halves`. Collective.

        Returns at once, unless ckpt.async_write is off; the commit follows while the next step runs.

        Raises:
            DiskFull: there is no room for it.
            CheckpointError: the write before this one failed.
        """
        with self.timed("save_ckpt"):
            self.writer.work.wait()
            reach("trainer_half.before", step=step)
            if self.world.is_main:
                require_room(self.layout.checkpoints, self.sizes.checkpoint, what=f"the trainer's half of checkpoint {step}")
                write_settings(begin_half(self.layout, step, TRAINER), self.config)
            barrier(self.world)
            self.being_written = step
            policy = self.publisher.running
            with explaining_full_disk(self.layout.checkpoints, what=f"checkpoint {step}", num_bytes=self.sizes.checkpoint):
                self.writer.start(
                    staging_directory(self.layout, step) / TRAINER,
                    state_of(self.learner, self.progress),
                    then=lambda known: self._commit(step, halves, known, policy),
                )
            reach("trainer_half.during", step=step)

    def settle(self, *, does_wait: bool = False) -> None:
        """Learn whether what is being written arrived by now, and remove what nobody needs any more.

        Args:
            does_wait: for all of it.

        Raises:
            DiskFull: there was no room for it.
            CheckpointError: the checkpoint could not be written.
        """
        if does_wait:
            self.publisher.wait()
        else:
            self.publisher.raise_failure()
        with explaining_full_disk(self.layout.checkpoints, what="a checkpoint", num_bytes=self.sizes.checkpoint):
            if does_wait:
                self.writer.work.wait()
            else:
                self.writer.work.raise_failure()
        if self.telemetry is not None:
            reach("clean_up.before", step=self.progress.step)
            self._retire_policies(self.telemetry)
            reach("clean_up.after", step=self.progress.step)

    def release_state(self) -> None:
        """Returns once parameters and optimizer may change, although their checkpoint is still being written."""
        started = time.monotonic()
        self.writer.release()
        self._add_time("wait_for_ckpt", time.monotonic() - started)

    def _add_time(self, name: str, seconds: float) -> None:
        self.times[f"time/{name}"] = self.times.get(f"time/{name}", 0.0) + seconds

    def _commit(self, step: Step, halves: Sequence[str], known: Mapping[str, FileRecord], policy: Future[None] | None) -> None:
        """Runs on the writer's thread once every rank's shards are written.

        Args:
            known: the records of the shards.
            policy: the publication of the same step, if it goes on; a checkpoint without its policy is none.
        """
        if self.telemetry is None:
            return
        if policy is not None:
            policy.result()
        finish_half(self.layout, step, TRAINER, known=known)
        reach("trainer_half.after", step=step)
        self.telemetry.sync_events()
        commit(self.layout, step, halves=halves)
        self.telemetry.write_event(Commit(step=step))
        logger.info("checkpoint committed step=%s", step)
        # Here rather than between two steps: the content of large files goes away slowly.
        self._remove_old_checkpoints()

    def _remove_old_checkpoints(self) -> None:
        ckpt, committed = self.config.ckpt, committed_steps(self.layout)
        for step in removable_steps(committed, keep_last=ckpt.keep_last, keep_interval=ckpt.keep_interval):
            remove_checkpoint(self.layout, step)

    def _retire_policies(self, telemetry: Telemetry) -> None:
        """Retire the policies that neither checkpoints nor readers need."""
        published = published_versions(self.layout)
        lag = self.keep_recent if self.config.deterministic else 0
        targets = [*committed_steps(self.layout), self.from_step, self.being_written or self.from_step]
        for version in retirable(
            published,
            latest=max(published, default=PolicyVersion(0)),
            keep_recent=self.keep_recent,
            in_use=list(reader_versions(self.layout).values()),
            kept=needed_to_resume(targets, lag=lag)
            | {reference_version(step, interval=self.reference_interval) for step in targets},
            keep_interval=self.config.ckpt.weights.interval,
        ):
            retire(self.layout, version)
            telemetry.write_event(Retire(version=version))

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
        for name, work in {"write_weights": self.publisher, "write_ckpt": self.writer.work}.items():
            if (times := work.take_times()) is not None:
                metrics |= {f"time/{name}": times.seconds, f"time/{name}_cpu": times.cpu_s}
        metrics |= speed_metrics(self.cost, rows, seconds=seconds, num_ranks=self.world.size, device=self.world.device)
        self.times.clear()
        if self.telemetry is not None:
            self.telemetry.write_step(step, metrics | dict(extra or {}))
        self.profiler.finish_step(step)


@contextmanager
def open_session(
    config: TrainingConfig,
    world: World,
    *,
    loss: Loss,
    role: Literal["trainer", "sft"],
    keep_recent: int,
    reference_interval: int | None = None,
) -> Iterator[Session]:
    """Load the model, go back to the checkpoint if one is asked for, and clear away what came after it. Collective.

    Returns once the last policy is published and the last checkpoint committed.

    Args:
        keep_recent: policies that stay besides the newest.
        reference_interval: steps after which the loss takes the published policy as its reference.

    Raises:
        ConfigError: no such model; or a fresh start over committed checkpoints.
        CheckpointError: the step to resume from is not there, or damaged; or a checkpoint could not be written.
        DiskFull: there is no room for what the run must write.
    """
    layout = RunLayout(config.output_dir)
    learning_rate = LearningRate(peak=config.optim.lr, schedule=config.scheduler, max_steps=config.max_steps)
    from_step = _choose_start(config, layout)
    torch.manual_seed(config.seed)
    profiler = Profiler(config, world)
    model = load_policy(config.model, world)
    learner = Learner(
        model=model,
        optimizer=make_optimizer(model.trained_parameters, config.optim, matrices=model.hidden_matrices),
        learning_rate=learning_rate,
        loss=loss,
        max_norm=config.optim.max_norm,
        micro_batch_tokens=config.micro_batch_tokens,
        # In a run the trainer's keys are a part of the run's.
        key_prefix="" if config.run == RunIdentity() else "trainer.",
        world=world,
    )
    if config.model.optim_cpu_offload:
        keep_state_on_host(learner.optimizer, world.device)
    progress = _resume(config, layout, learner, from_step) if from_step else Progress()
    sizes = measure_sizes(model, config)
    telemetry = None
    if world.is_main:
        discard_later(layout, from_step)
        discard_after(layout, PolicyVersion(from_step))
        require_budget(config, layout, sizes, from_step=from_step, keep_recent=keep_recent)
        telemetry = Telemetry(
            role,
            layout=layout,
            run=config.run,
            wandb=config.wandb,
            heartbeat=config.heartbeat,
            detectors=config.detectors,
            metrics_server=config.metrics_server,
            resume_step=from_step,
        )
        telemetry.write_event(Start(run_id=config.run.id, from_step=from_step))
    barrier(world)
    session = Session(
        config=config,
        layout=layout,
        world=world,
        learner=learner,
        exporter=Exporter(
            model=model,
            tokenizer=load_tokenizer(config),
            dtype=getattr(torch, config.model.compute_dtype),
            is_sharded=config.ckpt.weights.save_sharded,
        ),
        cost=model_cost(model),
        progress=progress,
        telemetry=telemetry,
        from_step=from_step,
        keep_recent=keep_recent,
        reference_interval=reference_interval,
        publisher=Background("publisher", is_async=config.ckpt.async_write),
        writer=HalfWriter(
            world, is_async=config.ckpt.async_write, timeout_s=max(_WRITE_TIMEOUT_S, config.dist_timeout_seconds)
        ),
        sizes=sizes,
        profiler=profiler,
    )
    learner.before_update = session.release_state
    reason = "failed"
    # What was loaded stays: no collection of garbage has to look at it again.
    gc.collect()
    gc.freeze()
    try:
        yield session
        session.settle(does_wait=True)
        reason = session.ending
    finally:
        gc.unfreeze()
        session.profiler.close()
        session.publisher.close()
        session.writer.close()
        if telemetry is not None:
            telemetry.write_event(Stop(step=Step(session.progress.step), reason=reason))
            telemetry.close()


def _choose_start(config: TrainingConfig, layout: RunLayout) -> Step:
    step = choose_resume_step(config, is_whole_verified=True)
    if step is not None:
        return step
    if committed := committed_steps(layout):
        raise ConfigError(
            f"{layout.checkpoints} holds the committed checkpoints {', '.join(map(str, committed))}, which a fresh start "
            "would remove; set ckpt.resume_step = -1 to go on from the newest, or choose another output_dir"
        )
    return Step(0)


def _resume(config: TrainingConfig, layout: RunLayout, learner: Learner, step: Step) -> Progress:
    if learner.world.is_main:
        verify_checkpoint(layout, step)
    barrier(learner.world)
    saved = load_half(layout.checkpoint_step(step) / TRAINER, learner, skip_optimizer=config.ckpt.skip_optimizer)
    if config.model.optim_cpu_offload:
        return_state(learner.optimizer)
    progress = begin_anew(saved, config.ckpt)
    learner.learning_rate = replace(learner.learning_rate, start=progress.schedule_start)
    logger.info("resumed step=%s total_tokens=%s", step, progress.total_tokens)
    return progress
