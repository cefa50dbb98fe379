import pytest

from trivet.exits import describe_exit, describe_restart
from trivet.wire.status import RestartRecord
from trivet.wire.versions import Step


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


TRAINING = RestartRecord(
    time=0, roles=["orchestrator", "trainer"], cause="trainer killed by SIGKILL", from_step=Step(6), lost_steps=1, down_s=14
)
INFERENCE = RestartRecord(time=1, roles=["inference"], cause="inference killed by SIGKILL")


def test_a_restart_is_described_with_its_cause_its_start_and_its_cost() -> None:
    assert describe_restart(TRAINING) == (
        "trainer killed by SIGKILL: orchestrator and trainer restarted from step 6 (1 step again), back after 14 s"
    )
    assert describe_restart(INFERENCE) == "inference killed by SIGKILL: inference restarted, no progress since"
