import subprocess
import sys
from pathlib import Path

import msgspec

from trivet.config.layout import RunLayout
from trivet.launcher.plan import TRAINING, ProcessSpec
from trivet.launcher.processes import Child
from trivet.launcher.supervision.role_processes import RoleProcess, forget_reports, read_reports
from trivet.wire.status import ProcessReport


def write_report(layout: RunLayout, rank: int = 0, *, step: int = 0, attempt: int = 1) -> None:
    layout.reports.mkdir(exist_ok=True)
    report = ProcessReport(role="trainer", rank=rank, pid=1, attempt=attempt, time=0, since=0, step=step)
    layout.report_file("trainer", rank).write_bytes(msgspec.json.encode(report))


def role_process(tmp_path: Path, program: str) -> RoleProcess:
    spec = ProcessSpec(
        name="trainer",
        unit=TRAINING,
        argv=(),
        log=tmp_path / "trainer.stdout",
        env={},
        env_defaults={},
        does_finish=True,
        num_reports=2,
    )
    with spec.log.open("wb") as log:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=log)
    return RoleProcess(Child(spec, process, log_offset=0), now=0.0)


def test_each_rank_has_its_stamp_and_a_missing_report_has_none(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    write_report(layout, 1)
    reports = read_reports(layout, "trainer", count=2)
    assert reports.stamps["trainer rank 0 of 2"] is None
    assert reports.stamps["trainer rank 1 of 2"] is not None
    assert [report.rank for report in reports.readable] == [1]


def test_a_report_that_cannot_be_read_is_still_a_sign_of_life(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    layout.reports.mkdir()
    layout.report_file("trainer").write_text("{")
    reports = read_reports(layout, "trainer", count=1)
    assert reports.stamps["trainer"] is not None
    assert reports.readable == ()


def test_reports_are_forgotten_before_a_restart(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    write_report(layout, 0)
    write_report(layout, 1)
    forget_reports(layout, "trainer", count=2)
    assert list(layout.reports.iterdir()) == []


def test_only_steps_of_the_current_attempt_count(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    write_report(layout, 0, step=7, attempt=2)
    role = role_process(tmp_path, "")
    role.read_reports(layout)
    assert (role.last_step(attempt=2), role.last_step(attempt=3)) == (7, 0)
    role.child.wait(20)


def test_the_words_of_a_failure_leave_out_what_differs_between_two_of_one_cause(tmp_path: Path) -> None:
    role = role_process(tmp_path, "print('12:00:01 waited 17 s for pid 4711'); raise SystemExit(1)")
    assert role.child.wait(20)
    role.poll(now=5.0, is_complete=lambda _: True)
    seen = role.observe(has_progressed=False)
    assert (seen.exit_code, seen.ended_at, seen.is_complete) == (1, 5.0, False)
    assert seen.last_log_line == "waited # s for pid #"
