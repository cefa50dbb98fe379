import subprocess
import sys
from pathlib import Path

import msgspec

from support.processes import wait_until
from trivet.config.layout import RunLayout
from trivet.launcher.plan import TRAINING, ProcessSpec, report_files
from trivet.launcher.processes import Child
from trivet.launcher.reports import read_reports
from trivet.launcher.supervision.role_processes import RoleProcess
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
        reports=report_files(RunLayout(tmp_path), "trainer", num_ranks=2),
    )
    with spec.log.open("wb") as log:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=log)
    return RoleProcess(Child(spec, process, log_offset=0), now=0.0)


def await_end(role: RoleProcess) -> None:
    wait_until(lambda: role.child.exit_code is not None, timeout_s=20, waiting_for="its end")


def test_only_steps_of_the_current_attempt_count(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    write_report(layout, 0, step=7, attempt=2)
    role = role_process(tmp_path, "")
    role.reports = read_reports(role.child.spec.reports)
    assert (role.last_step(attempt=2), role.last_step(attempt=3)) == (7, 0)
    await_end(role)


def test_the_words_of_a_failure_leave_out_what_differs_between_two_of_one_cause(tmp_path: Path) -> None:
    role = role_process(tmp_path, "print('12:00:01 waited 17 s for pid 4711'); raise SystemExit(1)")
    await_end(role)
    role.poll(now=5.0, is_complete=lambda _: True)
    seen = role.observe(has_progressed=False)
    assert (seen.exit_code, seen.ended_at, seen.is_complete) == (1, 5.0, False)
    assert seen.last_log_line == "waited # s for pid #"
