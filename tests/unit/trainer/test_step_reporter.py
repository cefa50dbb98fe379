from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from trivet.trainer.background import Background
from trivet.trainer.checkpoint.state import TrainerProgress
from trivet.trainer.measurement.fake_data import fake_rows
from trivet.trainer.step import StepResult
from trivet.trainer.step_reporter import StepReporter, step_metrics
from trivet.wire.versions import Step

RESULT = StepResult(
    loss=0.5,
    grad_norm=2.0,
    lr=0.1,
    values={"ratio": np.array([1.0, 3.0])},
    num_computed_tokens=12,
    flops=1e6,
    forward_backward_s=0.2,
    optimizer_s=0.1,
)
PROGRESS = TrainerProgress(step=4, total_tokens=100, total_samples=7)


class FakeProfiler:
    def __init__(self) -> None:
        self.steps: list[int] = []

    def finish_step(self, step: int) -> None:
        self.steps.append(step)


@pytest.fixture
def reporter(world, telemetry) -> Iterator[StepReporter]:
    background = Background("test", is_async=False)
    yield StepReporter(
        world=world,
        telemetry=telemetry,
        profiler=FakeProfiler(),
        background={"write_weights": background},
    )
    background.close()


def report(reporter: StepReporter, *, step: int, extra: Mapping[str, float]) -> Mapping[str, float]:
    with reporter.timed("step"), reporter.timed("wait_for_batch"):
        pass
    rows = fake_rows(step, seed=0, seq_len=8, vocab_size=10)
    reporter.report(Step(step), RESULT, rows, progress=PROGRESS, extra=extra)
    reported, metrics = reporter.telemetry.steps[-1]
    assert reported == step
    return metrics


def test_a_steps_metrics_are_its_values_and_totals() -> None:
    metrics = step_metrics(RESULT, PROGRESS, seconds=0.4)
    assert metrics["ratio/mean"] == 2.0
    assert metrics["loss/mean"] == 0.5
    assert metrics["time/step"] == 0.4
    assert (metrics["progress/total_tokens"], metrics["progress/total_samples"]) == (100, 7)


def test_a_report_has_the_steps_times_its_speed_and_what_the_caller_adds(reporter: StepReporter) -> None:
    metrics = report(reporter, step=4, extra={"data/epoch": 1})
    assert {"time/wait_for_batch", "perf/throughput", "loss/mean"} <= metrics.keys()
    assert metrics["data/epoch"] == 1
    assert metrics["perf/computed_tokens"] == 12
    assert reporter.profiler.steps == [4]
    assert reporter.times == {}, "the next step starts at 0"


def test_work_beside_the_steps_is_in_the_report_of_the_step_in_which_it_ended(reporter: StepReporter) -> None:
    assert "time/write_weights" not in report(reporter, step=1, extra={})
    reporter.background["write_weights"].start(lambda: None)
    assert {"time/write_weights", "time/write_weights_cpu"} <= report(reporter, step=2, extra={}).keys()
    assert "time/write_weights" not in report(reporter, step=3, extra={})
