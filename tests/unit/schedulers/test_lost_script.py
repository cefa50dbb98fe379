from collections.abc import Callable, Sequence

import pytest

from trivet.schedulers import lost_script
from trivet.schedulers.lost_script import replace_lost_script


class FakeSlurm:
    """Stand-ins for SLURM's commands. The job's first node is taken out at a given time, in seconds."""

    def __init__(self, *, taken_out_at_s: float, is_silent_until_s: float = 0.0) -> None:
        self.now = 0.0
        self.asked: list[str] = []
        self.num_questions = 0
        self._taken_out_at_s = taken_out_at_s
        self._is_silent_until_s = is_silent_until_s

    def run(self, command: Sequence[str]) -> str | None:
        if self.now < self._is_silent_until_s:
            return None
        if command[0] == "squeue":
            assert command[1:] == ["--noheader", "--jobs=17", "--nodelist=node1", "--format=%i"]
            self.num_questions += 1
            return "" if self.now >= self._taken_out_at_s else "17"
        self.asked.append(" ".join(command))
        return ""

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def replace(slurm: FakeSlurm, *, action: str = "scontrol requeue", is_over: Callable[[], bool] = lambda: False) -> bool:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(lost_script, "_run", slurm.run)
        return replace_lost_script(
            "17", host="node1", action=action, is_over=is_over, clock=lambda: slurm.now, sleep=slurm.sleep
        )


@pytest.mark.parametrize(("action", "asked"), [("scontrol requeue", "scontrol requeue 17"), ("scancel", "scancel 17")])
def test_a_job_whose_script_was_lost_with_its_node_is_queued_again_or_cancelled(action: str, asked: str) -> None:
    slurm = FakeSlurm(taken_out_at_s=300, is_silent_until_s=60)
    assert replace(slurm, action=action)
    assert slurm.asked == [asked]
    assert 300 <= slurm.now <= 330
    assert slurm.num_questions <= 21


def test_a_job_whose_first_node_notes_its_end_is_left_to_the_script() -> None:
    slurm = FakeSlurm(taken_out_at_s=300)
    assert not replace(slurm, is_over=lambda: slurm.now >= 20)
    assert (slurm.asked, slurm.now) == ([], 30)


def test_a_first_node_that_slurm_does_not_lose_is_not_watched_without_end() -> None:
    slurm = FakeSlurm(taken_out_at_s=1e9)
    assert not replace(slurm)
    assert (slurm.asked, slurm.now) == ([], 900)


def test_a_machine_without_slurm_asks_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "")
    slurm = FakeSlurm(taken_out_at_s=0)
    done = replace_lost_script(
        "17", host="node1", action="scancel", is_over=lambda: slurm.now > 0, clock=lambda: slurm.now, sleep=slurm.sleep
    )
    assert not done
    assert "squeue failed" in capsys.readouterr().err
