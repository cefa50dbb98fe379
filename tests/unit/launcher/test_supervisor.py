"""Histories of exits and what the supervisor makes of them."""

import pytest

from trivet.launcher.supervisor import Outcome, RoleState, Verdict, decide, describe_exit

PATIENCE_S = 60.0


class History:
    """A run told as events at times of a fake clock."""

    def __init__(self) -> None:
        self.roles = {
            "inference": RoleState(name="inference", does_finish=False),
            "orchestrator": RoleState(name="orchestrator", does_finish=True),
            "trainer": RoleState(name="trainer", does_finish=True),
        }
        self.interrupted_by: int | None = None

    def ends(self, name: str, code: int, *, at: float, is_complete: bool = False) -> "History":
        self.roles[name] = RoleState(
            name=name,
            does_finish=self.roles[name].does_finish,
            exit_code=code,
            ended_at=at,
            is_complete=is_complete,
            last_output_at=at,
        )
        return self

    def writes(self, name: str, *, at: float) -> "History":
        self.roles[name] = RoleState(name=name, does_finish=self.roles[name].does_finish, last_output_at=at)
        return self

    def verdict(self, *, now: float) -> Verdict | None:
        return decide(list(self.roles.values()), interrupted_by=self.interrupted_by, now=now, patience_s=PATIENCE_S)


def test_a_run_goes_on_while_all_roles_run() -> None:
    assert History().verdict(now=1e6) is None


@pytest.mark.parametrize("order", [("trainer", "orchestrator"), ("orchestrator", "trainer")])
def test_a_run_is_done_when_both_finished_in_either_order(order: tuple[str, str]) -> None:
    history = History().ends(order[0], 0, at=10, is_complete=True)
    assert history.verdict(now=11) is None
    verdict = history.ends(order[1], 0, at=40, is_complete=True).verdict(now=41)
    assert verdict is not None
    assert (verdict.outcome, verdict.exit_code) == (Outcome.DONE, 0)


@pytest.mark.parametrize("name", ["inference", "orchestrator", "trainer"])
def test_a_role_that_ends_early_with_0_fails_the_run(name: str) -> None:
    verdict = History().ends(name, 0, at=10).verdict(now=10)
    assert verdict is not None
    assert (verdict.outcome, verdict.exit_code, verdict.role) == (Outcome.FAILED, 1, name)
    assert verdict.reason == "ended with exit code 0 before its last step"


def test_a_server_that_ends_while_the_trainer_finishes_fails_the_run() -> None:
    history = History().ends("orchestrator", 0, at=10, is_complete=True).ends("inference", -9, at=12)
    verdict = history.verdict(now=12)
    assert verdict is not None
    assert (verdict.role, verdict.reason) == ("inference", "killed by SIGKILL")


@pytest.mark.parametrize(("code", "expected"), [(1, 1), (2, 2), (3, 3), (-9, 1), (137, 1), (143, 1)])
def test_bad_configuration_and_divergence_keep_their_exit_code(code: int, expected: int) -> None:
    verdict = History().ends("trainer", code, at=5).verdict(now=5)
    assert verdict is not None
    assert verdict.exit_code == expected


def test_the_first_failure_is_the_one_reported() -> None:
    history = History().ends("orchestrator", 1, at=7.5).ends("trainer", 3, at=7.0).ends("inference", -15, at=8)
    verdict = history.verdict(now=8)
    assert verdict is not None
    assert (verdict.role, verdict.exit_code) == ("trainer", 3)


def test_a_failure_after_the_other_finished_is_still_a_failure() -> None:
    history = History().ends("orchestrator", 0, at=10, is_complete=True).ends("trainer", 1, at=20)
    verdict = history.verdict(now=20)
    assert verdict is not None
    assert (verdict.outcome, verdict.role) == (Outcome.FAILED, "trainer")


def test_a_role_that_still_writes_is_waited_for_and_a_silent_one_is_not() -> None:
    history = History().ends("orchestrator", 0, at=10, is_complete=True).writes("trainer", at=60)
    assert history.verdict(now=60 + PATIENCE_S) is None
    verdict = history.verdict(now=61 + PATIENCE_S)
    assert verdict is not None
    assert (verdict.role, verdict.exit_code) == ("trainer", 1)
    assert verdict.reason == "still running and silent for 61 s after orchestrator finished"


def test_silence_before_the_other_finished_does_not_count() -> None:
    history = History().ends("orchestrator", 0, at=1000, is_complete=True).writes("trainer", at=5)
    assert history.verdict(now=1001) is None


@pytest.mark.parametrize(("number", "expected"), [(2, 130), (15, 143)])
def test_an_interrupt_ends_the_run_whatever_the_roles_did(number: int, expected: int) -> None:
    history = History().ends("trainer", 1, at=1)
    history.interrupted_by = number
    verdict = history.verdict(now=1)
    assert verdict is not None
    assert (verdict.outcome, verdict.exit_code) == (Outcome.INTERRUPTED, expected)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (1, "ended with exit code 1"),
        (-9, "killed by SIGKILL"),
        (-11, "killed by SIGSEGV"),
        (137, "ended with exit code 137 (SIGKILL)"),
        (255, "ended with exit code 255"),
        (None, "still running"),
    ],
)
def test_an_exit_is_described_with_the_name_of_its_signal(code: int | None, text: str) -> None:
    assert describe_exit(code) == text
