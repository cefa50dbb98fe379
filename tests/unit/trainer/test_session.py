from types import SimpleNamespace

import numpy as np
import pytest

from trivet.trainer.background import Background
from trivet.trainer.checkpoint.state import TrainerProgress
from trivet.trainer.measurement.fake import fake_rows
from trivet.trainer.session import Session
from trivet.trainer.step import StepResult
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


@pytest.fixture
def session(world, telemetry) -> Session:
    unused = dict.fromkeys(("config", "layout", "learner", "from_step"))
    return Session(
        **unused,  # type: ignore[reportArgumentType]  # a report needs none of them
        world=world,
        progress=TrainerProgress(step=4, total_tokens=100, total_samples=7),
        telemetry=telemetry,
        policies=SimpleNamespace(work=Background("policies", is_async=False)),
        checkpoints=SimpleNamespace(work=Background("checkpoints", is_async=False)),
        profiler=SimpleNamespace(steps=[], finish_step=lambda step: None),
    )


def report(session: Session, step: int, **extra: float) -> dict[str, float]:
    with session.timed("step"), session.timed("wait_for_batch"):
        pass
    session.report(Step(step), RESULT, fake_rows(step, seed=0, seq_len=8, vocab_size=10), extra=extra)
    reported, metrics = session.telemetry.steps[-1]
    assert reported == step
    return metrics


def test_a_report_has_the_steps_values_times_totals_and_what_the_caller_adds(session: Session) -> None:
    metrics = report(session, 4, **{"data/epoch": 1})
    assert metrics["ratio/mean"] == 2.0
    assert metrics["loss/mean"] == 0.5
    assert (metrics["progress/total_tokens"], metrics["progress/total_samples"]) == (100, 7)
    assert {"time/step", "time/wait_for_batch", "perf/throughput"} <= metrics.keys()
    assert metrics["data/epoch"] == 1
    assert metrics["perf/computed_tokens"] == 12
    assert session.times == {}, "the next step starts at 0"


def test_a_write_is_in_the_report_of_the_step_in_which_it_ended(session: Session) -> None:
    assert "time/write_weights" not in report(session, 1)
    session.policies.work.start(lambda: None)
    assert {"time/write_weights", "time/write_weights_cpu"} <= report(session, 2).keys()
    assert "time/write_weights" not in report(session, 3)
