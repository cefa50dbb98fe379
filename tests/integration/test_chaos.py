"""Inject faults into a whole run with the real vLLM. It loses and repeats nothing, ends, and leaves nothing behind."""

from pathlib import Path

import pytest

from support.chaos import ALL_FAULTS, ChaosRun, Planned, draw_schedule, last_step
from support.rl_run import Run

pytestmark = pytest.mark.vllm

TIMEOUT_S = 900.0
SEED = 1


CHOSEN = {
    ("optimizer_step.during", "kill", 1),
    ("commit.during", "kill", 0),
    ("batch_send.after", "kill", 0),
    ("batch_send.before", "kill env_worker", 0),
    ("weight_write.after", "flip", 0),
    ("optimizer_step.before", "stop", 0),
    ("batch_acknowledge.before", "lose", 0),
    ("batch_acknowledge.after", "duplicate", 0),
    ("batch_acknowledge.before", "delay", 0),
    ("dispatch.after", "clock_jump", 0),
}
"""Point, kind and rank: one fault of each kind. Restarts of server and launcher, which take longest, are left out."""


def is_chosen(planned: Planned) -> bool:
    return (planned.fault.point, planned.kind, planned.fault.rank) in CHOSEN


def test_a_run_survives_what_a_schedule_of_faults_does_to_it(tmp_path: Path, tiny_model: Path) -> None:
    schedule = draw_schedule(SEED, num_faults=len(CHOSEN), among=list(filter(is_chosen, ALL_FAULTS)))
    run = Run(tmp_path / "run", tiny_model, max_steps=last_step(schedule))
    outcome = ChaosRun(run=run, schedule=schedule, seed=SEED, directory=tmp_path, timeout_s=TIMEOUT_S).carry_out()
    assert len(outcome.survived) == len(CHOSEN), outcome.kinds
    assert outcome.report.last_step == last_step(schedule)
    assert outcome.report.last_stop is not None
    assert outcome.report.last_stop.reason == "done"
    assert outcome.launches == 1, "no fault of this schedule is one that the launcher may not survive"
