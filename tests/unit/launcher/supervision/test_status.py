"""status.json is whole or absent, and never ends a run; restarts are said as they happen."""

from pathlib import Path

import msgspec
import pytest

from support.fake_roles import FakeAttempts, FakeChild, FakeClock, FakeHost, make_log, make_spec, write_report
from trivet.config.layout import RunLayout
from trivet.launcher.plan import TRAINING, RecoveryUnit
from trivet.launcher.supervision.observer import Observer, RoleProcess
from trivet.launcher.supervision.recovery import AnnounceRestart, FinishRun, Recovery
from trivet.launcher.supervision.status import StatusReporter
from trivet.wire.status import RoleState, RunState, RunStatus, WorkerStatus
from trivet.wire.versions import Step

INFERENCE = RecoveryUnit("inference")


class Reported:
    """The status of a run with a trainer."""

    def __init__(self, tmp_path: Path, *, exit_code: int | None = None) -> None:
        self.layout, self.clock, (self.log, self.written) = RunLayout(tmp_path), FakeClock(), make_log(tmp_path)
        attempts = FakeAttempts(layout=self.layout)
        self.observer = Observer(attempts, host=FakeHost(), log=self.log, clock=self.clock)
        self.observer.add(FakeChild(spec=make_spec(self.layout, "trainer"), pid=7, exit_code=exit_code))
        self.status = StatusReporter(
            attempts,
            observer=self.observer,
            recovery=Recovery(attempts.config),
            log=self.log,
            clock=self.clock,
        )

    def read(self) -> RunStatus:
        return msgspec.json.decode(self.layout.status.read_bytes(), type=RunStatus)


def test_the_status_is_written_every_two_seconds_and_at_once_after_an_action(tmp_path: Path) -> None:
    run = Reported(tmp_path)
    run.status.write_when_due()
    run.clock.sleep(1)
    run.status.write_when_due()
    assert (run.read().started, run.read().time, run.read().state) == (100, 100, RunState.RUNNING)
    run.status.write_at_once()
    run.status.write_when_due()
    assert run.read().time == 101
    run.status.write(FinishRun(outcome=RunState.FAILED, exit_code=3, role="trainer", reason="why"))
    assert (run.read().state, run.read().exit_code, run.read().reason) == (RunState.FAILED, 3, "why")


def test_nothing_is_called_alive_of_a_role_that_has_ended(tmp_path: Path) -> None:
    run = Reported(tmp_path, exit_code=-9)
    write_report(run.layout, "trainer", pid=7, step=3, workers=[WorkerStatus(env="x", pid=8)])
    run.observer.update()
    run.status.write()
    (ended,) = run.read().roles
    assert (ended.pid, ended.state, ended.exit) == (7, RoleState.ENDED, "killed by SIGKILL")
    assert [(report.step, report.workers) for report in ended.reports] == [(3, [])]


def test_a_status_that_cannot_be_written_is_said_once_until_it_can_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, is_full = Reported(tmp_path), True

    def replace_file(path: Path, content: bytes) -> None:
        if is_full:
            raise OSError(28, "No space left on device")
        path.write_bytes(content)

    monkeypatch.setattr("trivet.launcher.supervision.status.replace_file", replace_file)
    run.status.write()
    run.status.write()
    is_full = False
    run.status.write()
    assert run.written.getvalue().count("cannot be written (No space left on device)") == 1
    assert run.layout.status.exists()


def make_role(tmp_path: Path, name: str) -> RoleProcess:
    spec = make_spec(RunLayout(tmp_path), name)
    spec.log.parent.mkdir(exist_ok=True)
    spec.log.write_text("out of memory\n")
    return RoleProcess(FakeChild(spec=spec, pid=1), now=0.0, watched_s=0.0)


def test_a_restart_of_training_costs_the_steps_since_the_checkpoint_and_the_time_until_progress(tmp_path: Path) -> None:
    run = Reported(tmp_path)
    action = AnnounceRestart(
        unit=TRAINING, roles=("trainer", "orchestrator"), role="trainer", cause="trainer killed by SIGKILL", delay_s=1
    )
    run.status.announce_restart(action, role=make_role(tmp_path, "trainer"), last_step=8)
    assert run.status.units_down == (TRAINING,)
    assert run.status.last_error.startswith("trainer killed by SIGKILL; last lines of ")
    assert "orchestrator and trainer go back to the last checkpoint, restart in 1 s" in run.written.getvalue()
    record = run.status.begin_restart(TRAINING, from_step=Step(6))
    assert (record.from_step, record.lost_steps, record.down_s) == (6, 2, None)
    run.clock.sleep(14)
    run.status.end_restart(TRAINING)
    assert run.status.units_down == ()
    assert run.status.restarts[0].down_s == 14
    run.status.summarize_restarts()
    assert "restarts: 1, 14 s without progress, 2 steps taken again" in run.written.getvalue()


def test_a_unit_that_fails_again_before_progress_is_down_since_the_second_failure(tmp_path: Path) -> None:
    run = Reported(tmp_path)
    action = AnnounceRestart(unit=INFERENCE, roles=("inference",), role="inference", cause="inference died", delay_s=1)
    for _ in range(2):
        run.status.announce_restart(action, role=make_role(tmp_path, "inference"), last_step=8)
        assert run.status.begin_restart(INFERENCE, from_step=None).lost_steps == 0
        run.clock.sleep(5)
    run.status.end_restart(INFERENCE)
    assert [record.down_s for record in run.status.restarts] == [None, 5]


def test_the_log_of_a_stuck_role_is_quoted_once(tmp_path: Path) -> None:
    run, role = Reported(tmp_path), make_role(tmp_path, "inference")
    role.stuck = "inference has not reported for 61 s"
    run.status.warn_stuck(role)
    action = AnnounceRestart(unit=INFERENCE, roles=("inference",), role="inference", cause="inference stuck", delay_s=1)
    run.status.announce_restart(action, role=role, last_step=0)
    assert run.written.getvalue().count("| out of memory") == 1
