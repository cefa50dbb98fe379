import msgspec
import pytest

from trivet.launcher.supervision.health import StallWatch, describe, situation_of
from trivet.wire.status import ProcessReport, WorkerStatus

AFTER_S = 100.0

TRAINER = ProcessReport(role="trainer", pid=1, time=0.0, since=0.0, activity="batch 3", waits_for="orchestrator", step=2)
WORKER = WorkerStatus(env="reverse", pid=3, num_pending=2, num_generating=5, num_scoring=3)
ORCHESTRATOR = ProcessReport(
    role="orchestrator",
    pid=2,
    time=0.0,
    since=0.0,
    activity="filling batch 3",
    policy_version=1,
    num_ready=0,
    num_in_flight=2,
    workers=[WORKER],
)


class Run:
    """A run that is checked every second of a fake clock."""

    def __init__(self) -> None:
        self.watch = StallWatch(after_s=AFTER_S)
        self.now = 1000.0
        self.reports = [TRAINER, ORCHESTRATOR]

    def passes(self, seconds: float) -> list[float]:
        """Return each message with its time."""
        said: list[float] = []
        for _ in range(int(seconds)):
            self.now += 1.0
            self.reports = [msgspec.structs.replace(report, time=self.now) for report in self.reports]
            if (still_s := self.watch.check(situation_of(self.reports), now=self.now)) is not None:
                said.append(still_s)
        return said


def test_a_run_that_does_not_move_is_named_after_the_time_and_then_ever_more_rarely() -> None:
    run = Run()
    assert run.passes(150) == [100.0]
    assert run.watch.is_first
    assert run.passes(750) == [200.0, 400.0, 800.0]
    assert not run.watch.is_first


@pytest.mark.parametrize(
    "change",
    [
        {"num_in_flight": 1},
        {"num_ready": 1},
        {"policy_version": 2},
        {"activity": "filling batch 4"},
        {"since": 50.0},
        {"attempt": 2},
        {"workers": [msgspec.structs.replace(WORKER, num_generating=4)]},
        {"workers": [msgspec.structs.replace(WORKER, pid=4)]},
    ],
)
def test_whatever_moves_starts_the_time_anew(change: dict[str, object]) -> None:
    run = Run()
    assert run.passes(99) == []
    run.reports[1] = msgspec.structs.replace(run.reports[1], **change)
    assert run.passes(100) == []
    assert run.passes(1) == [100.0]


def test_the_age_of_what_is_scored_is_no_movement() -> None:
    run = Run()
    run.passes(99)
    run.reports[1] = msgspec.structs.replace(
        run.reports[1], workers=[msgspec.structs.replace(WORKER, scoring_for_s=99.0, blocked_for_s=99.0)]
    )
    assert run.passes(3) == [100.0]


def test_a_process_that_comes_or_goes_is_a_movement() -> None:
    run = Run()
    run.passes(99)
    run.reports = run.reports[:1]
    assert run.passes(50) == []


def test_time_in_which_the_launcher_was_stopped_counts_for_nobody() -> None:
    run = Run()
    run.passes(90)
    run.now += 5000.0
    assert run.passes(10) == []
    assert run.passes(2) == [100.0]


def test_the_line_says_who_waits_for_whom_and_where_the_groups_are() -> None:
    ranks = [msgspec.structs.replace(TRAINER, rank=rank, num_ranks=2) for rank in range(2)]
    assert describe([ORCHESTRATOR, *ranks]) == (
        "orchestrator: filling batch 3 with 2 groups in flight, 0 ready; "
        "environment reverse: 2 groups pending, 5 rollouts generating, 3 scoring; "
        "trainer rank 0: waits for batch 3 (from orchestrator); trainer rank 1: waits for batch 3 (from orchestrator)"
    )
