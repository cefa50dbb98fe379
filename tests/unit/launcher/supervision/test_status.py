"""status.json is whole or absent, and never ends a run."""

import sys
from pathlib import Path

import msgspec
import pytest

from support.fake_roles import FakeAttempts, FakeChild, FakeClock, make_log, make_spec, write_report
from trivet.config.layout import RunLayout
from trivet.config.schema.deployment import RecoveryConfig
from trivet.launcher.logs import RunLog
from trivet.launcher.reports import read_reports
from trivet.launcher.supervision.decisions import Outcome, RecoveryVerdict
from trivet.launcher.supervision.recovery import Recovery
from trivet.launcher.supervision.restarts import RestartLog
from trivet.launcher.supervision.role_processes import RoleProcess
from trivet.launcher.supervision.status import StatusFile, StatusReporter
from trivet.wire.status import RunState, RunStatus, WorkerStatus

STATUS = RunStatus(run_id="r", attempt=1, pid=1, state=RunState.RUNNING, started=0.0, time=1.0)


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    with (tmp_path / "rl.log").open("a") as file:
        StatusFile(RunLayout(tmp_path), log=RunLog(sys.stdout, file)).write(STATUS)
    assert msgspec.json.decode((tmp_path / "status.json").read_bytes(), type=RunStatus) == STATUS


def test_a_status_that_cannot_be_written_is_said_once_until_it_can_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = tmp_path / "outputs"
    blocked.write_text("a file, where the directory should be")
    with (tmp_path / "rl.log").open("a") as file:
        status = StatusFile(RunLayout(blocked), log=RunLog(sys.stdout, file))
        status.write(STATUS)
        status.write(STATUS)
        blocked.unlink()
        status.write(STATUS)
    assert capsys.readouterr().out.count("cannot be written") == 1
    assert (blocked / "status.json").exists()


def test_the_status_is_written_every_two_seconds_and_at_once_after_an_action(tmp_path: Path) -> None:
    layout, clock, (log, _) = RunLayout(tmp_path), FakeClock(), make_log(tmp_path)
    role = RoleProcess(FakeChild(spec=make_spec(layout, "trainer"), pid=7, exit_code=-9), now=0.0)
    write_report(layout, "trainer", pid=7, step=3, workers=[WorkerStatus(env="x", pid=8)])
    role.reports = read_reports(role.child.spec.reports)
    status = StatusReporter(
        FakeAttempts(layout=layout),
        roles={"trainer": role},
        recovery=Recovery(RecoveryConfig(), stop_timeout_s=1.0, patience_s=1.0),
        restarts=RestartLog(log=log, clock=clock),
        log=log,
        clock=clock,
    )

    def written() -> RunStatus:
        return msgspec.json.decode(layout.status.read_bytes(), type=RunStatus)

    status.write_when_due()
    clock.sleep(1)
    status.write_when_due()
    assert (written().started, written().time, written().state) == (100, 100, RunState.RUNNING)
    (ended,) = written().roles
    assert (ended.pid, ended.exit) == (7, "killed by SIGKILL")
    assert [(report.step, report.workers) for report in ended.reports] == [(3, [])]  # no worker is alive without it
    status.write_at_once()
    status.write_when_due()
    assert written().time == 101
    status.write(RecoveryVerdict(outcome=Outcome.FAILED, exit_code=3, role="trainer", reason="why"))
    assert (written().state, written().exit_code, written().reason) == (RunState.FAILED, 3, "why")
