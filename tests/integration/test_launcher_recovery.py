"""Test restarts, the watchdog and preemption with real processes that stand in for the roles."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from support.processes import assert_all_gone, assert_named_in_time, still_alive, wait_until
from support.stand_in_launcher import StandInRun
from trivet.telemetry.events import read_events
from trivet.wire.events import Restart
from trivet.wire.status import RoleState, RunState, RunStatus

WATCHDOG_S = 4.0
"""The timeout for tests of the watchdog. Elsewhere a busy machine's pause must not look like a stuck role."""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[StandInRun]:
    run = StandInRun(tmp_path)
    run.recovery = {"max_restarts": 3, "backoff_s": 0.1, "watchdog_timeout_s": 120, "preemption_grace_s": 60}
    yield run
    run.close()


def status_of(run: StandInRun) -> RunStatus:
    return msgspec.json.decode(run.layout.status.read_bytes(), type=RunStatus)


def wait_for_progress(run: StandInRun) -> None:
    """Wait until the launcher has seen a finished step of the current attempt."""

    def has_progressed() -> bool:
        if not run.layout.status.exists():
            return False
        status = status_of(run)
        return any(report.step == 1 for role in status.roles if role.name == "trainer" for report in role.reports)

    wait_until(has_progressed, timeout_s=120, waiting_for="a step in status.json")


def finish(run: StandInRun) -> int:
    for name in ("orchestrator", "trainer"):
        run.act(name)
    return run.wait()


def test_inference_is_restarted_alone_on_its_port(run: StandInRun) -> None:
    run.start(orchestrator="finish", trainer="finish")
    others = [run.process_of("orchestrator"), run.process_of("trainer")]
    (run.directory / "inference.up").unlink()
    run.process_of("inference").kill()
    run.wait_up("inference")
    assert all(process.is_running() for process in others)
    assert finish(run) == 0
    run.assert_nothing_left()
    (restart,) = [event for event in read_events(run.layout.events) if isinstance(event, Restart)]
    assert (restart.roles, restart.cause, restart.from_step) == (["inference"], "inference killed by SIGKILL", None)
    assert "restarts: 1" in run.output


@pytest.mark.parametrize("name", ["orchestrator", "trainer"])
def test_trainer_and_orchestrator_are_restarted_together_and_inference_stays(run: StandInRun, name: str) -> None:
    run.start(orchestrator="finish", trainer="finish")
    wait_for_progress(run)
    inference = run.process_of("inference")
    before = [*run.process_of("orchestrator").children(), *run.process_of("trainer").children()]
    run.process_of(name).kill()
    run.wait_up("orchestrator", "trainer", attempt=2)
    assert inference.is_running()
    assert_all_gone(before)
    assert finish(run) == 0
    run.assert_nothing_left()
    assert f"{name} killed by SIGKILL: orchestrator and trainer restarted from the start (1 step again)" in run.output


def test_what_a_lost_role_leaves_is_ended_before_its_restart(run: StandInRun) -> None:
    run.start(trainer="loose-child")
    wait_for_progress(run)
    trainer = run.process_of("trainer")
    (loose,) = trainer.children()
    trainer.kill()
    run.wait_up("orchestrator", "trainer", attempt=2)
    assert not still_alive([loose])
    assert run.process_of("inference").is_running()


def test_restarts_are_bounded_and_recounted(run: StandInRun) -> None:
    run.recovery["max_restarts"] = 1
    run.start()
    wait_for_progress(run)
    run.process_of("trainer").kill()
    run.wait_up("orchestrator", "trainer", attempt=2)
    run.wait_for_output("SUCCESS Step 1 | trainer")
    wait_for_progress(run)
    run.process_of("orchestrator").kill()
    assert run.wait() == 1
    run.assert_nothing_left()
    assert "orchestrator failed: killed by SIGKILL, after 1 restarts within 600 s" in run.output
    status = status_of(run)
    assert (status.state, status.exit_code, len(status.restarts), status.attempt) == (RunState.FAILED, 1, 1, 2)


def test_an_error_at_the_start_ends_the_run_without_a_restart(run: StandInRun) -> None:
    run.launch("serve", "serve", "early")
    assert run.wait() == 1
    assert "trainer failed: ended with exit code 1, before the first step: a restart would meet the same" in run.output
    assert "| 12:00:00 cannot start" in run.output
    assert run.output.count("started trainer") == 1


@pytest.mark.parametrize("name", ["inference", "trainer"])
def test_a_stopped_role_is_named_within_the_timeout_with_its_last_lines_and_restarted(run: StandInRun, name: str) -> None:
    run.recovery["watchdog_timeout_s"] = WATCHDOG_S
    run.start()
    wait_for_progress(run)
    stopped = run.process_of(name)
    stopped.suspend()
    run.wait_for_output(f"WARNING {name} stuck: {name} has not reported for")
    run.wait_for_output(f"| 12:00:00 SUCCESS Step 1 | {name}")
    assert_named_in_time(run.output, name, timeout_s=WATCHDOG_S)
    run.wait_for_output("restart in 0.1 s")
    wait_until(lambda: run.output.count(f"started {name}") == 2, timeout_s=120, waiting_for="the restart")
    assert not still_alive([stopped])


def test_a_run_in_which_nothing_moves_is_named_with_who_waits_for_whom_and_goes_on(run: StandInRun) -> None:
    run.recovery["stall_warn_s"] = 2.0
    run.start()
    run.wait_for_output("WARNING nothing has moved for")
    run.wait_for_output("inference: starting; orchestrator: starting; trainer: starting")
    for name in ("inference", "orchestrator", "trainer"):
        log = run.layout.log_file(f"{name}.stdout")
        wait_until(lambda log=log: "most recent call first" in log.read_text(), timeout_s=60, waiting_for=f"stacks in {log}")
    assert run.launcher.poll() is None


def test_a_stopped_child_of_a_role_is_named(run: StandInRun) -> None:
    run.recovery |= {"on_stuck": "warn", "watchdog_timeout_s": WATCHDOG_S}
    run.start()
    (child,) = run.process_of("inference").children()
    child.suspend()
    run.wait_for_output(f"inference stuck: pid {child.pid} stopped by a signal")
    child.resume()
    run.wait_for_output("inference reports again")
    assert run.launcher.poll() is None


def test_a_stopped_role_ends_the_run_when_that_was_asked_for(run: StandInRun) -> None:
    run.recovery |= {"on_stuck": "stop", "watchdog_timeout_s": WATCHDOG_S}
    run.start()
    run.process_of("trainer").suspend()
    assert run.wait() == 1
    run.assert_nothing_left()
    assert 'recovery.on_stuck = "stop"' in run.output


def test_the_status_tells_of_running_roles_and_of_the_end(run: StandInRun) -> None:
    run.start()
    wait_for_progress(run)
    status = status_of(run)
    assert (status.state, status.pid) == (RunState.RUNNING, run.launcher.pid)
    assert {role.name: (role.state, role.pid) for role in status.roles} == {
        name: (RoleState.RUNNING, run.process_of(name).pid) for name in ("inference", "orchestrator", "trainer")
    }
    run.launcher.send_signal(signal.SIGINT)
    assert run.wait() == 130
    ended = status_of(run)
    assert (ended.state, ended.exit_code, ended.reason) == (RunState.INTERRUPTED, 130, "interrupted by SIGINT")
    assert {role.state for role in ended.roles} == {RoleState.ENDED}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_the_roles_commit_and_end_by_themselves(run: StandInRun, number: signal.Signals) -> None:
    run.start()
    wait_for_progress(run)
    roles = [run.process_of("orchestrator"), run.process_of("trainer")]
    run.launcher.send_signal(number)
    assert run.wait() == 128 + number
    run.assert_nothing_left()
    assert f"interrupted by {number.name}: 60 s to finish the step and commit it" in run.output
    assert f"interrupted by {number.name}; stopping" in run.output
    assert not still_alive(roles)


def test_a_step_that_outlasts_the_grace_is_cut_off(run: StandInRun) -> None:
    run.recovery["preemption_grace_s"] = 2
    run.start(trainer="slow")
    wait_for_progress(run)
    run.launcher.send_signal(signal.SIGTERM)
    assert run.wait() == 143
    run.assert_nothing_left()
    assert "the step was not over within 2 s (recovery.preemption_grace_s)" in run.output


def test_a_second_signal_does_not_wait_for_the_commit(run: StandInRun) -> None:
    run.recovery["preemption_grace_s"] = 1000
    run.start(trainer="slow")
    wait_for_progress(run)
    run.launcher.send_signal(signal.SIGTERM)
    run.wait_for_output("a second signal stops now")
    time.sleep(1.2)  # two signals within a second are one that came twice
    run.launcher.send_signal(signal.SIGTERM)
    assert run.wait() == 143
    run.assert_nothing_left()


def test_a_run_whose_last_step_is_committed_survives_the_loss_of_a_role(run: StandInRun) -> None:
    run.start(orchestrator="finish")
    (run.directory / "last_step_committed").touch()
    trainer = run.process_of("trainer")
    run.act("orchestrator")
    trainer.kill()
    assert run.wait() == 0
    run.assert_nothing_left()


def test_a_killed_launcher_takes_restarted_roles_with_it(run: StandInRun) -> None:
    run.start()
    wait_for_progress(run)
    run.process_of("trainer").kill()
    run.wait_up("orchestrator", "trainer", attempt=2)
    run.launcher.kill()
    run.launcher.wait()
    run.assert_nothing_left()
