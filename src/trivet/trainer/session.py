"""One rank's part of a training run: the learner, and everything durable around it. Used by the RL loop and by `sft`.

    Session ── learner: model, optimizer, loss, schedule (`trainer.step`)
            ├─ policies: weights/step_N, written and removed (`trainer.policies`)
            ├─ checkpoints: the trainer part, and the commit (`trainer.checkpoint.saver`)
            └─ telemetry, profiler, times: what is reported of a step

Methods that say collective are called by every rank; files are written by rank 0 alone, except sharded checkpoints. A session is
begun and ended by `trainer.open_session`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from trivet.algorithms.probe import Probe, convert_dtype
from trivet.config.layout import RunLayout
from trivet.config.schema.trainer import TrainingConfig
from trivet.errors import BatchError, Diverged
from trivet.faults import reach
from trivet.process.heap import Heap
from trivet.telemetry.metrics import summarize, timed
from trivet.telemetry.process_report import waiting
from trivet.telemetry.telemetry import Telemetry
from trivet.trainer.checkpoint.saver import CheckpointSaver
from trivet.trainer.checkpoint.state import TrainerProgress
from trivet.trainer.measurement.performance import speed_metrics
from trivet.trainer.measurement.profiling import Profiler
from trivet.trainer.policies import Policies
from trivet.trainer.probe import choose_samples, score
from trivet.trainer.ranks.world import World, barrier
from trivet.trainer.step import Learner, StepResult
from trivet.wire.batches import MicroBatch
from trivet.wire.versions import Step


@dataclass(slots=True, kw_only=True)
class Session:
    """Orders what happens after an update: publish, save, settle, report."""

    config: TrainingConfig
    layout: RunLayout
    world: World
    learner: Learner
    progress: TrainerProgress
    from_step: Step
    """The step resumed from, 0 for a fresh run."""
    telemetry: Telemetry | None
    """Set on rank 0 only."""
    policies: Policies
    checkpoints: CheckpointSaver
    profiler: Profiler
    times: dict[str, float] = field(default_factory=dict)
    """Seconds of the current step, by metric name."""
    probe_samples: list[list[int]] = field(default_factory=list)
    """Token ids of the run's probe; empty until it is chosen."""
    heap: Heap = field(default_factory=Heap)
    ending: str = "done"
    """The reason in the Stop event when no error ended the session."""

    def timed(self, name: str) -> AbstractContextManager[None]:
        """Add the seconds of the block to the step's `time/<name>`."""
        return timed(self.times, name)

    def choose_probe(self, rows: Sequence[MicroBatch]) -> None:
        """Take the tokens of the run's probe from the rows of a batch, unless it has one."""
        if self.config.weights.probe_tokens and not self.probe_samples:
            self.probe_samples = choose_samples(rows, num_tokens=self.config.weights.probe_tokens)

    def score_probe(self) -> Probe | None:
        """Return the probe of the model as it is now; None without tokens. Collective."""
        if not self.config.weights.probe_tokens or not self.probe_samples:
            return None
        with self.timed("probe"):
            dtype = convert_dtype(self.config.model.compute_dtype)
            return score(self.learner.model, self.probe_samples, self.world, dtype=dtype)

    def publish(self, step: Step) -> None:
        """Publish the weights as the policy of `step`, with the probe that servers must reproduce. Collective.

        Returns once they are copied, unless ckpt.async_write is off; the files are written while the next step runs.

        Raises:
            DiskFull: the disk is too full for them, or was for the policy before.
        """
        probe = self.score_probe()
        with self.timed("broadcast_weights"):
            self.policies.publish(step, probe=probe)

    def await_policy(self) -> None:
        """Wait until the policy that is being published can be read; raise the error of its publication. Collective."""
        with self.timed("wait_for_policy"), waiting("the policy's files", on="disk"):
            self.policies.wait_on_every_rank()

    def save(self, step: Step, *, parts: Sequence[str]) -> None:
        """Write the trainer part of checkpoint `step` and commit it together with the other `parts`. Collective.

        Returns once the state is copied, unless ckpt.async_write is off; the commit follows while the next step runs.

        Raises:
            DiskFull: the disk is too full for it.
            CheckpointError: the write before this one failed.
        """
        with self.timed("save_ckpt"):
            self.checkpoints.save(step, self.learner, self.progress, parts=parts, policy=self.policies.work.running)

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
                self.policies.work.wait()
                self.checkpoints.wait()
        self.raise_failure()
        if self.world.is_main:
            step = self.progress.step
            reach("clean_up.before", step=step)
            self.policies.retire_unneeded(step=step, newest_checkpoint=self.checkpoints.newest_begun)
            reach("clean_up.after", step=step)
        self.heap.trim_if_grown()

    def raise_failure(self) -> None:
        """Raise the error of a write that has failed, as `settle` does, without waiting for any."""
        self.policies.work.raise_failure()
        self.checkpoints.raise_failure()

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Let every rank end together when the block fails on all of them.

        No rank ends before rank 0 has written what it began, because the first rank that ends takes the others with it.
        """
        try:
            yield
        except (BatchError, Diverged):
            self.policies.work.close()
            self.checkpoints.work.close()
            barrier(self.world)
            raise

    def report(
        self, step: Step, result: StepResult, rows: Sequence[MicroBatch], *, extra: Mapping[str, float] | None = None
    ) -> None:
        """Write the metrics and the console line of a finished step; the next step's times start at 0.

        Args:
            rows: the whole batch of the step, the same on every rank.
            extra: further metrics.
        """
        seconds = self.times.pop("time/step")
        metrics = step_metrics(result, self.progress, seconds=seconds) | self.times
        for name, work in {"write_weights": self.policies.work, "write_ckpt": self.checkpoints.work}.items():
            if (times := work.take_times()) is not None:
                metrics |= {f"time/{name}": times[0], f"time/{name}_cpu": times[1]}
        metrics |= speed_metrics(
            rows,
            num_computed_tokens=result.num_computed_tokens,
            flops=result.flops,
            seconds=seconds,
            num_ranks=self.world.size,
            device=self.world.device,
        )
        self.times.clear()
        if self.telemetry is not None:
            self.telemetry.write_step(step, metrics | dict(extra or {}))
        self.profiler.finish_step(step)

    def close(self) -> None:
        """Wait for running writes to end, without raising their errors. May be called again."""
        self.policies.work.close()
        self.checkpoints.close()
        self.profiler.close()


def step_metrics(result: StepResult, progress: TrainerProgress, *, seconds: float) -> dict[str, float]:
    """Return the metrics of a step that took `seconds`: the summary of its values, its loss, rates, times and totals."""
    metrics: dict[str, float] = {}
    for name, values in result.values.items():
        metrics |= summarize(name, values)
    return metrics | {
        "loss/mean": result.loss,
        "optim/lr": result.lr,
        "optim/grad_norm": result.grad_norm,
        "time/step": seconds,
        "time/forward_backward": result.forward_backward_s,
        "time/optimizer": result.optimizer_s,
        "progress/total_tokens": progress.total_tokens,
        "progress/total_samples": progress.total_samples,
    }
