"""Terrible things happen to a whole run, with the real vLLM: it loses and repeats nothing, ends, and leaves nothing behind."""

from pathlib import Path

import pytest

from support.chaos import ALL_FAULTS, ChaosRun, Planned, draw_schedule, last_step
from support.rl_run import Run
from trivet.faults import Action

pytestmark = pytest.mark.vllm

TIMEOUT_S = 900.0
SEED = 1


def is_cheap(planned: Planned) -> bool:
    """Whether the inference server, which takes longest to start, lives on."""
    return planned.victim in ("", "env_worker") and not (
        planned.fault.point.startswith("reload") and planned.fault.action is Action.KILL
    )


def test_a_run_survives_what_a_schedule_of_faults_does_to_it(tmp_path: Path, tiny_model: Path) -> None:
    schedule = draw_schedule(SEED, num_faults=10, among=[planned for planned in ALL_FAULTS if is_cheap(planned)])
    run = Run(tmp_path / "run", tiny_model, max_steps=last_step(schedule))
    outcome = ChaosRun(run=run, schedule=schedule, seed=SEED, directory=tmp_path, timeout_s=TIMEOUT_S).carry_out()
    assert len(outcome.survived) >= 8, outcome.kinds
    assert outcome.report.last_step == last_step(schedule)
    assert outcome.report.last_stop is not None
    assert outcome.report.last_stop.reason == "done"
    assert outcome.launches == 1, "no fault of this schedule is one that the launcher may not survive"
