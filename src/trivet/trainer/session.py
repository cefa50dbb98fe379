"""One rank's part of a training run: the learner, and everything durable around it. Used by the RL loop and by `sft`.

Methods that say collective are called by every rank; files are written by rank 0 alone, except sharded checkpoints.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch

from trivet.checkpoints.budget import Sizes
from trivet.checkpoints.commit import commit, committed_steps
from trivet.checkpoints.parts import TRAINER, begin_part, finish_part, staging_directory
from trivet.checkpoints.retention import removable_steps, remove_checkpoint
from trivet.checkpoints.settings import write_settings
from trivet.config.layout import RunLayout
from trivet.config.sections.trainer import TrainingConfig
from trivet.disk import explaining_full_disk, require_room
from trivet.durable import FileRecord
from trivet.errors import BatchError, Diverged
from trivet.faults import reach
from trivet.telemetry.process_report import waiting
from trivet.telemetry.stats import summarize
from trivet.telemetry.telemetry import Telemetry
from trivet.telemetry.timing import timed
from trivet.trainer.background import Background
from trivet.trainer.checkpoint.part_writer import PartWriter
from trivet.trainer.checkpoint.state import TrainerProgress, state_of
from trivet.trainer.measurement.performance import ModelCost, speed_metrics
from trivet.trainer.measurement.profiling import Profiler
from trivet.trainer.model.export import Exporter
from trivet.trainer.ranks.world import World, barrier
from trivet.trainer.step import Learner, StepResult
from trivet.weights.catalog import published_versions
from trivet.weights.manifest import Manifest
from trivet.weights.publish import publish
from trivet.weights.retention import needed_to_resume, reader_versions, reference_version, retirable, retire
from trivet.wire.batches import MicroBatch
from trivet.wire.events import Commit, Publish, Retire
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
    progress: TrainerProgress
    telemetry: Telemetry | None
    """On rank 0."""
    from_step: Step
    """The step resumed from, 0 for a fresh run."""
    keep_recent: int
    """Policies that stay besides the newest, for servers that lag by design."""
    reference_interval: int | None
    """Steps after which the reference policy is renewed; None: it is not a published one."""
    publisher: Background
    writer: PartWriter
    sizes: Sizes
    profiler: Profiler
    ending: str = "done"
    """What the Stop event says when no error ended the session."""
    being_written: Step | None = None
    """The newest step whose checkpoint was begun."""
    times: dict[str, float] = field(default_factory=dict)
    """Seconds of the current step, by metric name."""

    def timed(self, name: str) -> AbstractContextManager[None]:
        """Adds the seconds of the block to the step's `time/<name>`."""
        return timed(self.times, name)

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
        with self.timed("wait_for_policy"), waiting("the policy's files", on="disk"):
            try:
                self.publisher.wait()
            finally:
                barrier(self.world)

    def _announce(self, manifest: Manifest) -> None:
        assert self.telemetry is not None
        self.telemetry.write_event(Publish(version=manifest.version, digest=manifest.digest))

    def save(self, step: Step, *, parts: Sequence[str]) -> None:
        """Write the trainer's part of checkpoint `step` and commit it together with the other `parts`. Collective.

        Returns at once, unless ckpt.async_write is off; the commit follows while the next step runs.

        Raises:
            DiskFull: there is no room for it.
            CheckpointError: the write before this one failed.
        """
        with self.timed("save_ckpt"):
            with self._explaining_full_disk(), waiting("the checkpoint before", on="disk"):
                self.writer.work.wait()
            reach("trainer_half.before", step=step)
            if self.world.is_main:
                require_room(self.layout.checkpoints, self.sizes.checkpoint, what=f"the trainer's part of checkpoint {step}")
                write_settings(begin_part(self.layout, step, TRAINER), self.config)
            barrier(self.world)
            self.being_written = step
            policy = self.publisher.running
            with explaining_full_disk(self.layout.checkpoints, what=f"checkpoint {step}", num_bytes=self.sizes.checkpoint):
                self.writer.start(
                    staging_directory(self.layout, step) / TRAINER,
                    state_of(self.learner, self.progress),
                    then=lambda known: self._commit(step, parts, known, policy),
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
            with waiting("the last policy and checkpoint", on="disk"):
                self.publisher.wait()
                with self._explaining_full_disk():
                    self.writer.work.wait()
        self.raise_failure()
        if self.telemetry is not None:
            reach("clean_up.before", step=self.progress.step)
            self._retire_policies(self.telemetry)
            reach("clean_up.after", step=self.progress.step)

    def raise_failure(self) -> None:
        """Raise what was met beside the steps, as `settle` does, without waiting for anything."""
        self.publisher.raise_failure()
        with self._explaining_full_disk():
            self.writer.work.raise_failure()

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """For what fails on every rank if it fails on one: none ends before rank 0 has written what it began, because the first
        rank that ends takes the others with it."""
        try:
            yield
        except (BatchError, Diverged):
            for work in (self.publisher, self.writer.work):
                work.close()
            barrier(self.world)
            raise

    def _explaining_full_disk(self) -> AbstractContextManager[None]:
        return explaining_full_disk(self.layout.checkpoints, what="a checkpoint", num_bytes=self.sizes.checkpoint)

    def release_state(self) -> None:
        """Returns once parameters and optimizer may change, although their checkpoint is still being written."""
        with self.timed("wait_for_ckpt"):
            self.writer.release()

    def _commit(self, step: Step, parts: Sequence[str], known: Mapping[str, FileRecord], policy: Future[None] | None) -> None:
        """Runs on the writer's thread once every rank's shards are written.

        Args:
            known: the records of the shards.
            policy: the publication of the same step, if it goes on; a checkpoint without its policy is none.
        """
        if self.telemetry is None:
            return
        if policy is not None:
            policy.result()
        finish_part(self.layout, step, TRAINER, known=known)
        reach("trainer_half.after", step=step)
        self.telemetry.sync_events()
        record = commit(self.layout, step, parts=parts, run_id=self.config.run.id)
        self.telemetry.write_event(Commit(step=step, digest=record.digest))
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
            # A checkpoint of this step or a later one is still to come.
            | {reference_version(step, interval=self.reference_interval) for step in (*targets, self.progress.step)},
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
