"""One rank's part of a training run: the learner, and everything durable around it. Used by the RL loop and by `sft`.

Methods that say collective are called by every rank; files are written by rank 0 alone, except sharded checkpoints. A session is
begun and ended by `trainer.open_session`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from trivet.algorithms.probe import Probe, ProbeDtype
from trivet.config.layout import RunLayout
from trivet.errors import BatchError, Diverged
from trivet.faults import reach
from trivet.process.heap import Heap
from trivet.telemetry.process_report import waiting
from trivet.telemetry.telemetry import Telemetry
from trivet.trainer.checkpoint.saver import CheckpointSaver
from trivet.trainer.checkpoint.state import TrainerProgress
from trivet.trainer.policy_publisher import PolicyPublisher
from trivet.trainer.policy_retention import PolicyRetention
from trivet.trainer.probe import choose_samples, score
from trivet.trainer.ranks.world import World, barrier
from trivet.trainer.step import Learner, StepResult
from trivet.trainer.step_reporter import StepReporter
from trivet.wire.batches import MicroBatch
from trivet.wire.versions import Step


@dataclass(slots=True, kw_only=True)
class Session:
    """Orders what happens after an update: publish, save, settle, report."""

    layout: RunLayout
    world: World
    learner: Learner
    progress: TrainerProgress
    from_step: Step
    """The step resumed from, 0 for a fresh run."""
    telemetry: Telemetry | None
    """Set on rank 0 only."""
    publisher: PolicyPublisher
    saver: CheckpointSaver
    retention: PolicyRetention
    reporter: StepReporter
    num_probe_tokens: int
    """Size of the probe; 0: policies carry none."""
    probe_dtype: ProbeDtype
    """The dtype that the model computes in."""
    probe_samples: list[list[int]] = field(default_factory=list)
    """Token ids of the run's probe; empty until it is chosen."""
    heap: Heap = field(default_factory=Heap)
    ending: str = "done"
    """The reason in the Stop event when no error ended the session."""

    def timed(self, name: str) -> AbstractContextManager[None]:
        """Add the seconds of the block to the step's `time/<name>`."""
        return self.reporter.timed(name)

    def choose_probe(self, rows: Sequence[MicroBatch]) -> None:
        """Take the tokens of the run's probe from the rows of a batch, unless it has one."""
        if self.num_probe_tokens and not self.probe_samples:
            self.probe_samples = choose_samples(rows, num_tokens=self.num_probe_tokens)

    def score_probe(self) -> Probe | None:
        """Return the probe of the model as it is now; None without tokens. Collective."""
        if not self.num_probe_tokens or not self.probe_samples:
            return None
        with self.timed("probe"):
            return score(self.learner.model, self.probe_samples, self.world, dtype=self.probe_dtype)

    def publish(self, step: Step) -> None:
        """Publish the weights as the policy of `step`, with the probe that servers must reproduce. Collective.

        Returns once they are copied, unless ckpt.async_write is off; the files are written while the next step runs.

        Raises:
            DiskFull: the disk is too full for them, or was for the policy before.
        """
        probe = self.score_probe()
        with self.timed("broadcast_weights"):
            self.publisher.publish(step, probe=probe)

    def await_policy(self) -> None:
        """Wait until the policy that is being published can be read; raise the error of its publication. Collective."""
        with self.timed("wait_for_policy"), waiting("the policy's files", on="disk"):
            self.publisher.wait_on_every_rank()

    def save(self, step: Step, *, parts: Sequence[str]) -> None:
        """Write the trainer part of checkpoint `step` and commit it together with the other `parts`. Collective.

        Returns at once, unless ckpt.async_write is off; the commit follows while the next step runs.

        Raises:
            DiskFull: the disk is too full for it.
            CheckpointError: the write before this one failed.
        """
        with self.timed("save_ckpt"):
            self.saver.save(step, self.learner, self.progress, parts=parts, policy=self.publisher.work.running)

    def release_state(self) -> None:
        """Return once parameters and optimizer may change, although their checkpoint is still being written."""
        with self.timed("wait_for_ckpt"):
            self.saver.writer.release()

    def settle(self, *, does_wait: bool = False) -> None:
        """Raise the error of a write that has failed by now. Remove policies and release memory that are no longer needed.

        Args:
            does_wait: wait for all writes first.

        Raises:
            DiskFull: the disk was too full for one.
            CheckpointError: the checkpoint could not be written.
        """
        if does_wait:
            with waiting("the last policy and checkpoint", on="disk"):
                self.publisher.work.wait()
                self.saver.wait()
        self.raise_failure()
        if self.telemetry is not None:
            step = self.progress.step
            reach("clean_up.before", step=step)
            self.retention.retire_unneeded(self.telemetry, step=step, newest_checkpoint=self.saver.newest_begun)
            reach("clean_up.after", step=step)
        self.heap.trim_if_grown()

    def raise_failure(self) -> None:
        """Raise the error of a write that has failed, as `settle` does, without waiting for any."""
        self.publisher.work.raise_failure()
        self.saver.raise_failure()

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Let every rank end together when the block fails on all of them.

        No rank ends before rank 0 has written what it began, because the first rank that ends takes the others with it.
        """
        try:
            yield
        except (BatchError, Diverged):
            for work in (self.publisher.work, self.saver.writer.work):
                work.close()
            barrier(self.world)
            raise

    def report(
        self, step: Step, result: StepResult, rows: Sequence[MicroBatch], *, extra: Mapping[str, float] | None = None
    ) -> None:
        """Write the metrics and the console line of a finished step; the next step's times start at 0."""
        self.reporter.report(step, result, rows, progress=self.progress, extra=extra or {})

    def close(self) -> None:
        """Wait for running writes to end, without raising their errors. May be called again."""
        self.publisher.work.close()
        self.saver.writer.close()
        self.reporter.profiler.close()
