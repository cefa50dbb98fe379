import os
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from support.processes import wait_until
from trivet.config.layout import RunLayout
from trivet.telemetry import process_report
from trivet.telemetry.process_report import ProcessReporter
from trivet.wire.status import ProcessReport, WorkerStatus


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_after_a_wait_that_may_fail_the_process_does_what_it_did_before() -> None:
    clock = Clock()
    reporter = ProcessReporter(clock=clock)
    reporter.begin("training step 3")
    clock.now = 105.0
    inside = reporter.report(role="trainer")
    with suppress(RuntimeError), reporter.waiting("batch 4", on="orchestrator"):
        inside = reporter.report(role="trainer")
        raise RuntimeError
    after = reporter.report(role="trainer")
    assert (inside.activity, inside.waits_for, inside.since) == ("batch 4", "orchestrator", 105.0)
    assert (after.activity, after.waits_for, after.since, after.time) == ("training step 3", "", 100.0, 105.0)


def test_numbers_and_workers_are_part_of_the_report() -> None:
    reporter = ProcessReporter()
    reporter.set_numbers(step=4, num_ready=2)
    reporter.set_worker_source(lambda: [WorkerStatus(env="x", pid=1)])
    report = reporter.report(role="orchestrator", attempt=3)
    assert (report.step, report.num_ready, report.attempt, report.pid) == (4, 2, 3, os.getpid())
    assert [worker.env for worker in report.workers] == ["x"]


def test_reports_are_written_at_once_again_and_when_a_wait_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = RunLayout(tmp_path).report_file("trainer", 1)

    def read() -> ProcessReport:
        return msgspec.json.decode(path.read_bytes(), type=ProcessReport)

    monkeypatch.setattr(process_report, "REPORT_INTERVAL_S", 0.01)
    process_report.start_reports(RunLayout(tmp_path), role="trainer", attempt=2, rank=1, num_ranks=2)
    assert (read().rank, read().num_ranks, read().attempt) == (1, 2, 2)
    process_report.begin("training step 9")
    wait_until(lambda: read().activity == "training step 9", timeout_s=20, waiting_for="a second report")
    monkeypatch.setattr(process_report, "REPORT_INTERVAL_S", 3600.0)
    process_report.begin_waiting("the self-check", on="orchestrator")
    wait_until(lambda: read().waits_for == "orchestrator", timeout_s=20, waiting_for="the report of the wait")
