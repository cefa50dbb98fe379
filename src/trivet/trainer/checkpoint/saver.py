"""Saves checkpoints: copies the learner's state, writes the trainer part while the next steps run, and commits it on rank 0.

Owned by `trainer.session`.

consumes: the learner's state between two updates
produces: this rank's shards; on rank 0 the commit of the checkpoint, after which old ones are removed
waits for: the checkpoint before it, in `save` and `wait`; its thread waits for the other ranks' threads and the policy of its step
unblocked by: the disk; the ranks' group gives up after `_WRITE_TIMEOUT_S`
"""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch.distributed as dist

from trivet.checkpoints.commit import commit, committed_steps, removable_steps, remove_checkpoint
from trivet.checkpoints.data_record import DataRecord, write_data_record
from trivet.checkpoints.parts import TRAINER, begin_part, finish_part, staging_directory
from trivet.checkpoints.run_record import require_newest_attempt
from trivet.checkpoints.settings import write_settings
from trivet.config.layout import RunLayout
from trivet.config.schema.trainer import TrainingConfig
from trivet.faults import reach
from trivet.storage.disk import explaining_full_disk, require_free_space
from trivet.telemetry.process_report import waiting
from trivet.telemetry.telemetry import Telemetry
from trivet.trainer.background import Background
from trivet.trainer.checkpoint.shard_file import ShardFile
from trivet.trainer.checkpoint.state import TrainerProgress, state_of
from trivet.trainer.ranks.world import World, barrier, open_group
from trivet.trainer.step import Learner
from trivet.wire.events import Commit
from trivet.wire.versions import Step

logger = logging.getLogger(__name__)

_WRITE_TIMEOUT_S = 1800.0
"""How much longer than the fastest rank the slowest may take to write a checkpoint; a longer dist_timeout_seconds wins."""


@dataclass(slots=True, kw_only=True)
class CheckpointSaver:
    """Saves at most one checkpoint at a time."""

    config: TrainingConfig
    layout: RunLayout
    world: World
    num_bytes: int
    """Size of one trainer part on disk, over all ranks."""
    telemetry: Telemetry | None
    """Set on rank 0 only."""
    data: Mapping[str, DataRecord] = field(default_factory=dict[str, DataRecord])
    """The data that are trained on, where they are files; kept in every checkpoint."""
    newest_begun: Step | None = None
    """The newest step whose checkpoint was begun."""
    work: Background = field(init=False)
    _group: dist.ProcessGroup = field(init=False)
    """A group of its own: the steps use theirs meanwhile, and one group must not carry two exchanges at the same time."""
    _file: ShardFile = field(init=False)

    def __post_init__(self) -> None:
        """Open the group of the writing threads. Collective."""
        self.work = Background("checkpoint-writer", is_async=self.config.ckpt.async_write)
        self._group = open_group(self.world, timeout_s=max(_WRITE_TIMEOUT_S, self.config.dist_timeout_seconds))
        self._file = ShardFile(self.world)

    def save(
        self, step: Step, learner: Learner, progress: TrainerProgress, *, parts: Sequence[str], policy: Future[None] | None
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
            self._file.copy(staging_directory(self.layout, step) / TRAINER, state_of(learner, progress))
            self.work.start(lambda: self._write(step, parts, policy))
        reach("trainer_half.during", step=step)

    def wait(self) -> None:
        """Wait until the checkpoint that is being saved is committed; raise its error if it failed."""
        with self._explaining_full_disk():
            self.work.wait()

    def raise_failure(self) -> None:
        """Raise the error of a save that failed, without waiting for one that is still running."""
        with self._explaining_full_disk():
            self.work.raise_failure()

    def close(self) -> None:
        """Wait for a running write to end, without raising its error. May be called again."""
        self.work.close()

    def _explaining_full_disk(self, what: str = "a checkpoint") -> AbstractContextManager[None]:
        return explaining_full_disk(self.layout.checkpoints, what=what, num_bytes=self.num_bytes)

    def _write(self, step: Step, parts: Sequence[str], policy: Future[None] | None) -> None:
        """Write this rank's shards, and once every rank has written its own, commit on rank 0. Runs on the thread of `work`."""
        records = self._file.write(self._group)
        if self.telemetry is None:
            return
        if policy is not None:
            policy.result()
        finish_part(self.layout, step, TRAINER, known=records)
        reach("trainer_half.after", step=step)
        self.telemetry.sync_events()
        require_newest_attempt(self.layout, self.config.run)
        record = commit(self.layout, step, parts=parts, run_id=self.config.run.id)
        self.telemetry.write_event(Commit(step=step, digest=record.digest))
        logger.info("checkpoint committed step=%s", step)
        # Here rather than between two steps: the content of large files goes away slowly.
        ckpt = self.config.ckpt
        for old in removable_steps(committed_steps(self.layout), keep_last=ckpt.keep_last, keep_interval=ckpt.keep_interval):
            remove_checkpoint(self.layout, old)
