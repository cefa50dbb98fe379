from pathlib import Path

from support.fake_roles import FakeChild, FakeClock, make_log, make_spec
from trivet.config.layout import RunLayout
from trivet.exits import describe_restart
from trivet.launcher.plan import TRAINING, RecoveryUnit
from trivet.launcher.supervision.decisions import AnnounceRestart, Outcome, RecoveryVerdict
from trivet.launcher.supervision.restarts import RestartLog, summarize_restarts
from trivet.launcher.supervision.role_processes import RoleProcess
from trivet.wire.status import RestartRecord
from trivet.wire.versions import Step

TRAINING_RECORD = RestartRecord(
    time=0, roles=["orchestrator", "trainer"], cause="trainer killed by SIGKILL", from_step=Step(6), lost_steps=1, down_s=14
)
INFERENCE_UNIT = RecoveryUnit("inference")
INFERENCE_RECORD = RestartRecord(time=1, roles=["inference"], cause="inference killed by SIGKILL")


def test_restarts_are_summarized_in_order_with_their_sum() -> None:
    head, first, second = summarize_restarts([TRAINING_RECORD, INFERENCE_RECORD])
    assert head == "restarts: 2, 14 s without progress, 1 steps taken again"
    assert first.endswith(describe_restart(TRAINING_RECORD))
    assert second.endswith(describe_restart(INFERENCE_RECORD))
    assert list(summarize_restarts([])) == []


def make_role(tmp_path: Path, name: str) -> RoleProcess:
    spec = make_spec(RunLayout(tmp_path), name)
    spec.log.parent.mkdir(exist_ok=True)
    spec.log.write_text("out of memory\n")
    return RoleProcess(FakeChild(spec=spec, pid=1), now=0.0)


def test_a_restart_of_training_costs_the_steps_since_the_checkpoint_and_the_time_until_progress(tmp_path: Path) -> None:
    clock, (log, written) = FakeClock(), make_log(tmp_path)
    restarts = RestartLog(log=log, clock=clock)
    action = AnnounceRestart(
        unit=TRAINING, roles=("trainer", "orchestrator"), role="trainer", cause="trainer killed by SIGKILL", delay_s=1
    )
    restarts.announce(action, role=make_role(tmp_path, "trainer"), last_step=8)
    assert restarts.units_down == (TRAINING,)
    assert restarts.last_error.startswith("trainer killed by SIGKILL; last lines of ")
    assert "orchestrator and trainer go back to the last checkpoint, restart in 1 s" in written.getvalue()
    record = restarts.begin(TRAINING, from_step=Step(6))
    assert (record.from_step, record.lost_steps, record.down_s) == (6, 2, None)
    clock.sleep(14)
    restarts.end(TRAINING)
    assert restarts.units_down == ()
    assert restarts.records[0].down_s == 14


def test_a_unit_that_fails_again_before_progress_is_down_since_the_second_failure(tmp_path: Path) -> None:
    clock, (log, _) = FakeClock(), make_log(tmp_path)
    restarts = RestartLog(log=log, clock=clock)
    action = AnnounceRestart(
        unit=INFERENCE_UNIT, roles=("inference",), role="inference", cause="inference killed by SIGKILL", delay_s=1
    )
    for _ in range(2):
        restarts.announce(action, role=make_role(tmp_path, "inference"), last_step=8)
        assert restarts.begin(INFERENCE_UNIT, from_step=None).lost_steps == 0
        clock.sleep(5)
    restarts.end(INFERENCE_UNIT)
    assert [record.down_s for record in restarts.records] == [None, 5]


def test_the_log_of_a_stuck_role_is_quoted_once(tmp_path: Path) -> None:
    log, written = make_log(tmp_path)
    restarts, role = RestartLog(log=log, clock=FakeClock()), make_role(tmp_path, "inference")
    role.stuck = "inference has not reported for 61 s"
    restarts.warn_stuck(role, hint="(hint)")
    action = AnnounceRestart(unit=INFERENCE_UNIT, roles=("inference",), role="inference", cause="inference stuck", delay_s=1)
    restarts.announce(action, role=role, last_step=0)
    assert written.getvalue().count("| out of memory") == 1


def test_the_failure_that_ends_a_run_is_the_last_error(tmp_path: Path) -> None:
    log, _ = make_log(tmp_path)
    restarts = RestartLog(log=log, clock=FakeClock())
    done = RecoveryVerdict(outcome=Outcome.DONE, exit_code=0, role=None, reason="every step is done")
    restarts.fail(done, role=None)
    assert restarts.last_error == ""
    failed = RecoveryVerdict(outcome=Outcome.FAILED, exit_code=3, role="trainer", reason="ended with exit code 3")
    restarts.fail(failed, role=make_role(tmp_path, "trainer"))
    assert restarts.last_error.startswith("trainer failed: ended with exit code 3\nlast lines of ")
