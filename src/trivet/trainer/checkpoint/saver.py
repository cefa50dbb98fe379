"""Saves checkpoints: begins the trainer part of a step, and commits it with the other part once all ranks have written.

Called by `trainer.session`; the writing itself is `PartWriter`'s. Rank 0 commits, on the writer's thread.
"""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from trivet.checkpoints.commit import commit, committed_steps
from trivet.checkpoints.data_record import DataRecord, write_data_record
from trivet.checkpoints.parts import TRAINER, begin_part, finish_part, staging_directory
from trivet.checkpoints.retention import removable_steps, remove_checkpoint
from trivet.checkpoints.run_record import require_newest_attempt
from trivet.checkpoints.settings import write_settings
from trivet.config.layout import RunLayout
from trivet.config.schema.trainer import TrainingConfig
from trivet.faults import reach
from trivet.storage.disk import explaining_full_disk, require_free_space
from trivet.storage.durable import FileRecord
from trivet.telemetry.process_report import waiting
from trivet.telemetry.telemetry import Telemetry
from trivet.trainer.checkpoint.part_writer import PartWriter
from trivet.trainer.checkpoint.state import TrainerProgress, state_of
from trivet.trainer.ranks.world import World, barrier
from trivet.trainer.step import Learner
from trivet.wire.events import Commit
from trivet.wire.versions import Step

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class CheckpointSaver:
    """Saves at most one checkpoint at a time."""

    config: TrainingConfig
    layout: RunLayout
    world: World
    writer: PartWriter
    num_bytes: int
    """Size of one trainer part on disk, over all ranks."""
    telemetry: Telemetry | None
    """Set on rank 0 only."""
    data: Mapping[str, DataRecord] = field(default_factory=dict[str, DataRecord])
    """The data that are trained on, where they are files; kept in every checkpoint."""
    newest_begun: Step | None = None
    """The newest step whose checkpoint was begun."""

    def save(
        self,
        step: Step,
        learner: Learner,
        progress: TrainerProgress,
        *,
        parts: Sequence[str],
        policy: Future[None] | None,
    ) -> None:
        """Write the trainer part of checkpoint `step` and commit it together with the other `parts`. Collective.

        Args:
            policy: the publication of the same step, if it is still running; a checkpoint is not committed without its policy.

        Raises:
            DiskFull: the disk is too full for it.
            CheckpointError: the write before this one failed.
        """
        with waiting("the checkpoint before", on="disk"):
            self.wait()
        reach("trainer_half.before", step=step)
        if self.world.is_main:
            require_free_space(self.layout.checkpoints, self.num_bytes, what=f"the trainer's part of checkpoint {step}")
            part = begin_part(self.layout, step, TRAINER)
            write_settings(part, self.config)
            write_data_record(part, self.data)
        barrier(self.world)
        self.newest_begun = step
        with self._explaining_full_disk(f"checkpoint {step}"):
            self.writer.start(
                staging_directory(self.layout, step) / TRAINER,
                state_of(learner, progress),
                on_written=lambda known: self._commit(step, parts, known, policy),
            )
        reach("trainer_half.during", step=step)

    def wait(self) -> None:
        """Wait until the checkpoint that is being saved is committed; raise its error if it failed."""
        with self._explaining_full_disk():
            self.writer.work.wait()

    def raise_failure(self) -> None:
        """Raise the error of a save that failed, without waiting for one that is still running."""
        with self._explaining_full_disk():
            self.writer.work.raise_failure()

    def _explaining_full_disk(self, what: str = "a checkpoint") -> AbstractContextManager[None]:
        return explaining_full_disk(self.layout.checkpoints, what=what, num_bytes=self.num_bytes)

    def _commit(self, step: Step, parts: Sequence[str], known: Mapping[str, FileRecord], policy: Future[None] | None) -> None:
        """Commit on rank 0; runs on the writer's thread once every rank's shards, of which `known` has the records, are written."""
        if self.telemetry is None:
            return
        if policy is not None:
            policy.result()
        finish_part(self.layout, step, TRAINER, known=known)
        reach("trainer_half.after", step=step)
        self.telemetry.sync_events()
        require_newest_attempt(self.layout, self.config.run)
        record = commit(self.layout, step, parts=parts, run_id=self.config.run.id)
        self.telemetry.write_event(Commit(step=step, digest=record.digest))
        logger.info("checkpoint committed step=%s", step)
        # Here rather than between two steps: the content of large files goes away slowly.
        self._remove_old()

    def _remove_old(self) -> None:
        ckpt, committed = self.config.ckpt, committed_steps(self.layout)
        for step in removable_steps(committed, keep_last=ckpt.keep_last, keep_interval=ckpt.keep_interval):
            remove_checkpoint(self.layout, step)
