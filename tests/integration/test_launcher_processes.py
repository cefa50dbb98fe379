"""Run the launcher with real processes that stand in for the roles. However they end, nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.processes import wait_until
from support.stand_in_launcher import ENDED_WITHIN_S, ROLES, STAND_IN_RUN, StandInRun


@pytest.fixture
def run(tmp_path: Path) -> Iterator[StandInRun]:
    run = StandInRun(tmp_path)
    yield run
    run.close()


def test_roles_have_sessions_and_children_of_their_own(run: StandInRun) -> None:
    run.start()
    assert len(run.processes) == 1 + 2 * len(ROLES)
    assert len({os.getsid(process.pid) for process in run.processes}) == len(run.processes)


@pytest.mark.parametrize("name", ROLES)
def test_a_killed_role_ends_the_run_with_a_report_and_nothing_left(run: StandInRun, name: str) -> None:
    run.start()
    run.process_of(name).kill()
    assert run.wait() == 1
    run.assert_nothing_left()
    assert f"{name} failed: killed by SIGKILL" in run.output
    assert f"full log: {run.directory}/logs/{name}.stdout" in run.output


def test_a_killed_launcher_takes_everything_with_it(run: StandInRun) -> None:
    run.start()
    run.launcher.kill()
    run.launcher.wait()
    run.assert_nothing_left()


def test_a_run_can_start_where_a_killed_launcher_ran(run: StandInRun) -> None:
    run.start()
    run.launcher.kill()
    run.launcher.wait()
    run.assert_nothing_left()
    for name in ROLES:
        (run.directory / f"{name}.up").unlink()
    run.start()
    run.launcher.send_signal(signal.SIGTERM)
    assert run.wait() == 143


@pytest.mark.parametrize("name", ROLES)
def test_a_role_that_ends_early_with_0_ends_the_run_with_1(run: StandInRun, name: str) -> None:
    run.start()
    run.act(name)
    assert run.wait() == 1
    run.assert_nothing_left()
    report = run.output
    assert f"{name} failed: ended with exit code 0 before its last step" in report
    quoted = [line for line in report.splitlines() if "  | " in line]
    assert len(quoted) == 20
    assert quoted[-1].endswith(f"{name} line 29")


@pytest.mark.parametrize("code", [2, 3])
def test_bad_configuration_and_divergence_of_a_role_are_the_exit_code_of_the_run(run: StandInRun, code: int) -> None:
    run.start(trainer=str(code))
    run.act("trainer")
    assert run.wait() == code
    run.assert_nothing_left()


def test_a_run_is_done_when_trainer_and_orchestrator_finished(run: StandInRun) -> None:
    run.start(orchestrator="finish", trainer="finish")
    run.act("orchestrator")
    wait_until(run.directory.joinpath("orchestrator.done").exists, timeout_s=60, waiting_for="the orchestrator to finish")
    run.act("trainer")
    assert run.wait() == 0
    run.assert_nothing_left()
    assert "done after" in run.output


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_an_interrupt_stops_every_role(run: StandInRun, number: signal.Signals, expected: int) -> None:
    run.start()
    run.launcher.send_signal(number)
    assert run.wait() == expected
    run.assert_nothing_left()


def test_a_role_that_ignores_sigterm_is_killed_after_the_deadline(run: StandInRun) -> None:
    run.start(trainer="stubborn")
    run.launcher.send_signal(signal.SIGINT)
    assert run.wait() == 130
    run.assert_nothing_left()
    assert "trainer did not end within 2 s of SIGTERM and was killed" in run.output


def test_a_child_that_left_its_group_and_ignores_sigterm_is_ended_too(run: StandInRun) -> None:
    run.start(inference="loose-child", trainer="loose-child")
    run.process_of("trainer").kill()
    assert run.wait() == 1
    run.assert_nothing_left()


def test_a_stopped_role_is_ended(run: StandInRun) -> None:
    run.start()
    run.process_of("trainer").suspend()
    run.launcher.send_signal(signal.SIGINT)
    assert run.wait() == 130
    run.assert_nothing_left()


def test_a_second_launcher_in_the_directory_is_refused_and_the_first_goes_on(run: StandInRun) -> None:
    run.start()
    second = subprocess.run(
        [sys.executable, str(STAND_IN_RUN), "{}", *["serve"] * 3, *map(str, run.ports)],
        cwd=run.directory,
        capture_output=True,
        text=True,
        timeout=ENDED_WITHIN_S,
    )
    assert second.returncode == 2
    assert f"in use by the run with pid {run.launcher.pid}" in second.stderr
    assert run.launcher.poll() is None
    assert all(process.is_running() for process in run.processes)


def test_step_lines_of_orchestrator_and_trainer_reach_the_terminal(run: StandInRun) -> None:
    run.start()
    wait_until(lambda: run.output.count("SUCCESS Step 1") == 2, timeout_s=60, waiting_for="the step lines")
    run.launcher.send_signal(signal.SIGTERM)
    run.wait()
    lines = [line for line in run.output.splitlines() if "SUCCESS" in line]
    assert sorted(lines) == ["12:00:00 SUCCESS Step 1 | orchestrator", "12:00:00 SUCCESS Step 1 | trainer"]
    assert (run.directory / "logs" / "rl.log").read_text() == run.output


def test_a_failure_is_noticed_at_once(run: StandInRun) -> None:
    run.start()
    killed_at = time.monotonic()
    run.process_of("inference").kill()
    run.wait()
    assert time.monotonic() - killed_at < 20  # where it is patient it waits 30 s
