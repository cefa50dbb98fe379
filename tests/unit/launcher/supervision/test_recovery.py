"""Give recovery histories of exits, signals and reports, and check its decisions."""

import signal

import pytest

from support.recovery_history import INFERENCE, PATIENCE_S, SIGINT, SIGTERM, STOP_S, TEACHER, History, make_role
from trivet.launcher.plan import TRAINING, RecoveryUnit
from trivet.launcher.supervision.recovery import (
    MAX_BACKOFF_S,
    AnnounceRestart,
    FinishRun,
    PreemptRun,
    RecoveryAction,
    StartUnit,
    StopRoles,
)
from trivet.wire.status import RunState


def announced(actions: list[RecoveryAction]) -> AnnounceRestart:
    """Return the restart that is announced first."""
    assert isinstance(actions[0], AnnounceRestart), actions
    return actions[0]


def test_a_run_goes_on_while_all_roles_run() -> None:
    assert History().at(1e6) == []


@pytest.mark.parametrize("order", [("trainer", "orchestrator"), ("orchestrator", "trainer")])
def test_a_run_is_done_when_both_finished_in_either_order(order: tuple[str, str]) -> None:
    history = History().ends(order[0], 0, at=10, is_complete=True)
    assert history.at(11) == []
    verdict = history.ends(order[1], 0, at=40, is_complete=True).verdict(at=41)
    assert (verdict.outcome, verdict.exit_code) == (RunState.DONE, 0)


@pytest.mark.parametrize("unit", [INFERENCE, TEACHER])
def test_a_server_is_restarted_alone_after_the_delay(unit: RecoveryUnit) -> None:
    history = History(backoff_s=4)
    history.roles["teacher"] = make_role("teacher", unit=TEACHER)
    assert history.ends(unit, -9, at=10).at(10) == [
        AnnounceRestart(unit=unit, roles=(unit,), role=unit, cause=f"{unit} killed by SIGKILL", delay_s=4)
    ]
    assert history.at(10.2) == history.at(13.9) == []
    assert history.at(14) == [StartUnit(unit=unit)]


@pytest.mark.parametrize(("dead", "partner"), [("trainer", "orchestrator"), ("orchestrator", "trainer")])
def test_trainer_and_orchestrator_go_back_together(dead: str, partner: str) -> None:
    history = History(backoff_s=1).ends(dead, 1, at=10)
    restart, stop = history.at(10)
    assert restart == AnnounceRestart(
        unit=TRAINING, roles=("orchestrator", "trainer"), role=dead, cause=f"{dead} ended with exit code 1", delay_s=1
    )
    assert stop == StopRoles(roles=(partner,), by_kill=False)
    assert history.at(12) == []  # the partner has not ended
    history.ends(partner, 143, at=13)
    assert history.at(13) == []
    assert history.at(13.2) == [StartUnit(unit=TRAINING)]


def test_a_partner_that_ignores_the_request_is_killed_at_the_deadline() -> None:
    history = History().ends("trainer", -9, at=10)
    history.at(10)
    assert history.at(10 + STOP_S - 1) == []
    assert history.at(10 + STOP_S) == [StopRoles(roles=("orchestrator",), by_kill=True)]
    assert history.at(10 + STOP_S + 1) == []


def test_both_units_recover_at_the_same_time() -> None:
    history = History(backoff_s=0).ends("inference", -9, at=10).ends("trainer", -9, at=10).ends("orchestrator", 1, at=11)
    units = {action.unit for action in history.at(11) if isinstance(action, AnnounceRestart)}
    assert units == {INFERENCE, TRAINING}
    history.at(11.2)
    assert history.at(11.4) == [StartUnit(unit=INFERENCE), StartUnit(unit=TRAINING)]


def on_one_gpu(**recovery: object) -> History:
    """Return a run whose trainer takes memory of the server's GPU."""
    return History(**recovery).knows("trainer", starts_after=("inference",))


def test_a_trainer_starts_again_once_the_server_on_its_gpu_answers() -> None:
    history = on_one_gpu(backoff_s=0).ends("inference", -9, at=10).ends("trainer", -9, at=10).ends("orchestrator", 1, at=10)
    history.at(10)
    assert history.at(11) == []
    assert history.at(12) == [StartUnit(unit=INFERENCE)]
    history.starts("inference").knows("inference", has_progressed=False)
    assert history.at(60) == []
    history.knows("inference", has_progressed=True)
    assert history.at(61) == [StartUnit(unit=TRAINING)]


@pytest.mark.parametrize("facts", [{"is_waiting": True}, {"exit_code": -9, "ended_at": 39}], ids=["waits", "ended"])
def test_a_server_starts_again_once_the_trainer_on_its_gpu_waits_for_rollouts_or_has_ended(facts: dict[str, object]) -> None:
    history = on_one_gpu(backoff_s=0).ends("inference", -9, at=10)
    history.at(10)
    history.at(11)
    assert history.at(12) == []  # the trainer is in the middle of a step
    assert StartUnit(unit=INFERENCE) in history.knows("trainer", **facts).at(40)


def test_a_teacher_waits_for_the_server_that_starts_on_its_gpu() -> None:
    history = History(backoff_s=0).knows("inference", starts_after=("teacher",), has_progressed=False)
    history.roles["teacher"] = make_role("teacher", unit=TEACHER)
    history.ends("teacher", -9, at=10)
    history.at(10)
    history.at(11)
    assert history.at(12) == []
    assert history.knows("inference", has_progressed=True).at(13) == [StartUnit(unit=TEACHER)]


def test_a_role_that_ends_early_with_0_has_failed() -> None:
    restart = announced(History().ends("inference", 0, at=10).at(10))
    assert restart.cause == "inference ended with exit code 0 before its last step"


def test_the_wait_doubles_with_each_restart_in_the_window_up_to_a_minute() -> None:
    history = History(max_restarts=8, restart_window_s=1e6, backoff_s=2)
    delays: list[float] = []
    for round_ in range(7):
        delays.append(announced(history.ends("inference", -9, at=round_ * 100).at(round_ * 100)).delay_s)
        history.at(round_ * 100 + 1)
        assert history.at(round_ * 100 + MAX_BACKOFF_S) == [StartUnit(unit=INFERENCE)]
        history.starts("inference")
    assert delays == [2, 4, 8, 16, 32, 60, 60]


def test_restarts_are_bounded_within_the_window() -> None:
    history = History(max_restarts=2, restart_window_s=1000).recovers_training(at=100).recovers_training(at=300)
    verdict = history.ends("trainer", -9, at=500).verdict(at=500)
    assert (verdict.outcome, verdict.exit_code, verdict.role) == (RunState.FAILED, 1, "trainer")
    assert "after 2 restarts within 1000 s (recovery.max_restarts" in verdict.reason
    later = History(max_restarts=2, restart_window_s=1000).recovers_training(at=100).recovers_training(at=300)
    announced(later.ends("trainer", -9, at=1200).at(1200))


def test_restarts_of_inference_do_not_use_up_those_of_training() -> None:
    history = History(max_restarts=1, backoff_s=0).ends("inference", -9, at=1)
    for moment in (1, 2, 3):
        history.at(moment)
    history.starts("inference").recovers_training(at=10)


@pytest.mark.parametrize(
    ("recovery", "name", "facts", "exit_code", "reason"),
    [
        pytest.param({"max_restarts": 0}, "trainer", {"exit_code": -9}, 1, "killed by SIGKILL", id="no restarts"),
        pytest.param({}, "trainer", {"exit_code": 2}, 2, "ended with exit code 2", id="bad configuration"),
        pytest.param({}, "trainer", {"exit_code": 3}, 3, "ended with exit code 3", id="diverged"),
        pytest.param(
            {},
            "trainer",
            {"exit_code": 1, "has_progressed": False},
            1,
            "ended with exit code 1, before the first step: a restart would meet the same",
            id="an error before the first step",
        ),
        pytest.param(
            {},
            "inference",
            {"exit_code": 1, "has_progressed": False},
            1,
            "ended with exit code 1, before it answered: a restart would meet the same",
            id="a server that cannot start",
        ),
        pytest.param(
            {"on_stuck": "stop"},
            "inference",
            {"stuck": "no report for 120 s"},
            1,
            'stuck: no report for 120 s (recovery.on_stuck = "stop")',
            id="stuck",
        ),
    ],
)
def test_a_failure_that_is_final_ends_the_run(
    recovery: dict[str, object], name: str, facts: dict[str, object], exit_code: int, reason: str
) -> None:
    verdict = History(**recovery).knows(name, ended_at=5, **facts).verdict(at=5)
    assert (verdict.outcome, verdict.exit_code, verdict.role) == (RunState.FAILED, exit_code, name)
    assert verdict.reason == reason


def test_divergence_that_shows_while_the_partner_is_stopped_ends_the_run() -> None:
    history = History().ends("orchestrator", 1, at=5)
    history.at(5)
    verdict = history.ends("trainer", 3, at=6).verdict(at=6)
    assert (verdict.exit_code, verdict.role) == (3, "trainer")


def test_the_first_failure_is_the_one_reported() -> None:
    history = History(max_restarts=0).ends("orchestrator", 1, at=7.5).ends("trainer", 3, at=7.0)
    verdict = history.verdict(at=8)
    assert (verdict.role, verdict.exit_code) == ("trainer", 3)


def test_a_role_that_was_killed_while_it_started_is_tried_again_once() -> None:
    history = History(max_restarts=9, backoff_s=0).ends("inference", -9, at=5, has_progressed=False)
    announced(history.at(5))
    history.at(6)
    history.at(7)
    verdict = history.starts("inference").ends("inference", -9, at=9, has_progressed=False).verdict(at=9)
    assert "again before it answered and in the same way" in verdict.reason


def test_a_restart_that_fails_differently_is_tried_again() -> None:
    history = History(max_restarts=9).recovers_training(at=10)
    announced(history.ends("trainer", 1, at=100, has_progressed=False, last_log_line="port taken").at(100))
    history.ends("orchestrator", 143, at=101).at(101)
    assert history.at(200) == [StartUnit(unit=TRAINING)]
    history.starts("orchestrator", "trainer").ends("trainer", 1, at=210, has_progressed=False, last_log_line="no memory")
    announced(history.at(210))


def test_progress_between_two_like_failures_makes_them_two() -> None:
    history = History(max_restarts=9).recovers_training(at=10)
    announced(history.ends("trainer", -9, at=100, has_progressed=False).at(100))
    history.ends("orchestrator", 143, at=101).at(101)
    history.at(200)
    history.starts("orchestrator", "trainer").recovers_training(at=300)
    announced(history.ends("trainer", -9, at=400, has_progressed=False).at(400))


def test_a_stuck_role_is_killed_and_its_partner_asked_unless_only_a_warning_was_asked_for() -> None:
    restart, *stops = History().knows("trainer", stuck="no report for 120 s").at(10)
    assert announced([restart]).cause == "trainer stuck: no report for 120 s"
    assert stops == [StopRoles(roles=("orchestrator",), by_kill=False), StopRoles(roles=("trainer",), by_kill=True)]
    assert History(on_stuck="warn").knows("trainer", stuck="no report for 120 s").at(10) == []


@pytest.mark.parametrize("facts", [{"exit_code": -9}, {"exit_code": 137}, {"stuck": "no report for 120 s"}])
def test_a_role_lost_after_the_last_commit_has_done_its_work(facts: dict[str, object]) -> None:
    history = History().ends("orchestrator", 0, at=10, is_complete=True).knows("trainer", ended_at=11, **facts)
    history.is_last_step_committed = True
    assert history.verdict(at=12).outcome is RunState.DONE


def test_an_error_after_the_last_commit_is_an_error_but_not_repeated() -> None:
    history = History().ends("orchestrator", 1, at=10)
    history.is_last_step_committed = True
    assert history.verdict(at=12).reason == "ended with exit code 1 after the last step was committed"


def test_a_role_that_still_writes_is_waited_for_and_a_silent_one_is_not() -> None:
    history = History().ends("orchestrator", 0, at=10, is_complete=True).knows("trainer", last_output_at=60.0)
    assert history.at(60 + PATIENCE_S) == []
    verdict = history.verdict(at=61 + PATIENCE_S)
    assert (verdict.role, verdict.exit_code) == ("trainer", 1)
    assert verdict.reason == "still running and silent for 61 s after orchestrator finished"


def test_silence_before_the_other_finished_does_not_count() -> None:
    history = History().ends("orchestrator", 0, at=1000, is_complete=True).knows("trainer", last_output_at=5.0)
    assert history.at(1001) == []


def interrupted(history: History, number: int, *, at: float) -> list[RecoveryAction]:
    history.interrupted_by = number
    return history.at(at)


def assert_interrupted(actions: list[RecoveryAction], number: int) -> FinishRun:
    """Check that the run ends as one that the signal ended, and return the verdict."""
    (action,) = actions
    assert isinstance(action, FinishRun)
    assert (action.outcome, action.exit_code) == (RunState.INTERRUPTED, 128 + number)
    return action


def test_sigint_ends_the_run_at_once() -> None:
    assert_interrupted(interrupted(History(), SIGINT, at=10), SIGINT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_and_a_closed_terminal_ask_once_for_a_commit_and_the_run_ends_when_both_have_ended(
    number: signal.Signals,
) -> None:
    history = History(preemption_grace_s=60)
    assert interrupted(history, number, at=10) == [PreemptRun(reason=f"interrupted by {number.name}", grace_s=60)]
    assert history.at(11) == []
    assert history.ends("orchestrator", 0, at=12).at(12) == []
    verdict = assert_interrupted(history.ends("trainer", 0, at=15).at(15), number)
    assert verdict.reason == f"interrupted by {number.name}"


def test_sigterm_leaves_a_trainer_the_time_for_its_last_step_after_the_orchestrator_is_done() -> None:
    history = History(preemption_grace_s=60).ends("orchestrator", 0, at=9, is_complete=True)
    assert interrupted(history, SIGTERM, at=10) == [PreemptRun(reason="interrupted by SIGTERM", grace_s=60)]
    assert history.at(30) == []
    verdict = history.ends("trainer", 0, at=31, is_complete=True).verdict(at=31)
    assert (verdict.outcome, verdict.exit_code) == (RunState.DONE, 0)


@pytest.mark.parametrize("is_complete", [True, False], ids=["finished", "committed its last step"])
def test_a_run_that_finishes_while_it_is_preempted_is_done(is_complete: bool) -> None:
    history = History()
    interrupted(history, SIGTERM, at=10)
    history.ends("orchestrator", 0, at=11, is_complete=is_complete).ends("trainer", 0, at=12, is_complete=True)
    history.is_last_step_committed = not is_complete
    assert history.verdict(at=12).outcome is RunState.DONE


@pytest.mark.parametrize("name", ["orchestrator", "trainer"])
def test_a_failure_while_the_commit_is_awaited_ends_the_wait(name: str) -> None:
    history = History()
    interrupted(history, SIGTERM, at=10)
    verdict = assert_interrupted(history.ends(name, -9, at=12).at(12), SIGTERM)
    assert verdict.reason == f"interrupted by SIGTERM, and {name} killed by SIGKILL before the commit"


def test_the_grace_ends_and_so_does_the_wait_after_a_second_signal() -> None:
    history = History(preemption_grace_s=60)
    interrupted(history, SIGTERM, at=10)
    assert history.at(69) == []
    assert "not over within 60 s (recovery.preemption_grace_s)" in history.verdict(at=70).reason
    history = History()
    interrupted(history, SIGTERM, at=10)
    history.is_repeated = True
    assert_interrupted(history.at(12), SIGTERM)


@pytest.mark.parametrize(
    ("recovery", "facts"),
    [({"preemption_grace_s": 0}, {}), ({}, {"stuck": "no report"}), ({}, {"exit_code": -9, "ended_at": 9})],
    ids=["no grace", "stuck", "during a restart"],
)
def test_sigterm_ends_at_once_what_cannot_commit(recovery: dict[str, object], facts: dict[str, object]) -> None:
    history = History(**recovery)
    if "exit_code" in facts:
        history.knows("trainer", **facts).at(9)
    assert_interrupted(interrupted(history.knows("trainer", **facts), SIGTERM, at=10), SIGTERM)


def starting(*, progressed: str = "") -> History:
    """Return a run in which only the role `progressed` has progressed."""
    history = History(preemption_grace_s=60)
    for name in history.roles:
        history.knows(name, has_progressed=name == progressed)
    return history


@pytest.mark.parametrize(("number", "late_s"), [(SIGINT, 0), (SIGTERM, 3)])
def test_a_signal_while_the_servers_start_finds_no_step_to_commit(number: int, late_s: int) -> None:
    history = starting()
    if late_s:
        assert interrupted(history, number, at=10) == []
    verdict = assert_interrupted(interrupted(history, number, at=10 + late_s), number)
    assert verdict.reason.endswith("during the start, with no step to commit")


def test_sigterm_right_after_the_first_step_waits_for_its_report_and_has_it_committed() -> None:
    history = starting()
    assert interrupted(history, SIGTERM, at=10) == []
    history.knows("trainer", has_progressed=True)
    assert history.at(11) == [PreemptRun(reason="interrupted by SIGTERM", grace_s=60)]


@pytest.mark.parametrize("done", ["inference", "trainer"], ids=["first step under way", "server restarted"])
def test_sigterm_asks_for_a_commit_once_a_step_is_under_way(done: str) -> None:
    assert interrupted(starting(progressed=done), SIGTERM, at=10) == [PreemptRun(reason="interrupted by SIGTERM", grace_s=60)]
