"""Turns a finished step into its metrics, console line and profile. Called by `trainer.session` on every rank."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from trivet.telemetry.metrics import summarize, timed
from trivet.telemetry.telemetry import Telemetry
from trivet.trainer.background import Background
from trivet.trainer.checkpoint.state import TrainerProgress
from trivet.trainer.measurement.performance import speed_metrics
from trivet.trainer.measurement.profiling import Profiler
from trivet.trainer.ranks.world import World
from trivet.trainer.step import StepResult
from trivet.wire.batches import MicroBatch
from trivet.wire.versions import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReporter:
    """Collects the times of one step, then reports the step."""

    world: World
    telemetry: Telemetry | None
    """Set on rank 0 only."""
    profiler: Profiler
    background: Mapping[str, Background]
    """Writes that run while steps are taken, by the name of its metric under `time/`."""
    times: dict[str, float] = field(default_factory=dict)
    """Seconds of the current step, by metric name."""

    def timed(self, name: str) -> AbstractContextManager[None]:
        """Add the seconds of the block to the step's `time/<name>`."""
        return timed(self.times, name)

    def report(
        self,
        step: Step,
        result: StepResult,
        rows: Sequence[MicroBatch],
        *,
        progress: TrainerProgress,
        extra: Mapping[str, float],
    ) -> None:
        """Write the metrics and the console line of `step`; the next step's times start at 0.

        Args:
            rows: the whole batch of the step, the same on every rank.
            extra: further metrics.
        """
        seconds = self.times.pop("time/step")
        metrics = step_metrics(result, progress, seconds=seconds) | self.times
        for name, work in self.background.items():
            if (times := work.take_times()) is not None:
                metrics |= {f"time/{name}": times.seconds, f"time/{name}_cpu": times.cpu_s}
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
            self.telemetry.write_step(step, metrics | dict(extra))
        self.profiler.finish_step(step)


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
