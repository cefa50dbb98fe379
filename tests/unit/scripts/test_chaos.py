"""Test what scripts/chaos.py draws and reports. tests/integration/test_chaos.py shows that a run survives it."""

from dataclasses import replace

import msgspec
import pytest

from support.chaos import ALL_FAULTS, FIRST_STEP, Outcome, Survived, draw_schedule, last_step
from support.scripts import load_script
from trivet.faults import POINTS, FaultAction
from trivet.history.record import Outline
from trivet.history.run_history import RunHistory
from trivet.wire.versions import Step

script = load_script("chaos")


def test_a_schedule_is_a_function_of_its_seed():
    assert draw_schedule(7, num_faults=50) == draw_schedule(7, num_faults=50)
    assert draw_schedule(7, num_faults=50) != draw_schedule(8, num_faults=50)


def test_no_fault_comes_again_before_every_other_has_come():
    schedule = draw_schedule(7, num_faults=len(ALL_FAULTS) + 5)
    drawn = [replace(planned, fault=msgspec.structs.replace(planned.fault, name="", step=0)) for planned in schedule]
    assert set(drawn[: len(ALL_FAULTS)]) == set(ALL_FAULTS)


def test_each_fault_has_a_step_of_its_own_and_the_run_goes_on_after_the_last():
    schedule = draw_schedule(7, num_faults=20)
    assert [planned.fault.step for planned in schedule] == list(range(FIRST_STEP, FIRST_STEP + 20))
    assert len({planned.fault.name for planned in schedule}) == 20
    assert last_step(schedule) > schedule[-1].fault.step


def test_every_point_of_the_step_is_struck_and_every_kind_of_fault_comes():
    assert {planned.fault.point for planned in ALL_FAULTS} == POINTS
    assert {planned.fault.action for planned in ALL_FAULTS} == set(FaultAction)
    assert {planned.victim for planned in ALL_FAULTS} == {"", "launcher", "inference", "env_worker"}


def test_the_summary_counts_kinds_and_says_how_long_each_part_took_to_come_back():
    kills = [planned for planned in ALL_FAULTS if planned.kind == "kill"]
    training = next(planned for planned in kills if planned.fault.point == "commit.before")
    serving = next(planned for planned in kills if planned.fault.point == "reload.during")
    survived = [
        Survived(planned=training, step=3, at=0.0, next_step_s=10.04, next_load_s=8.0),
        Survived(planned=training, step=4, at=0.0, next_step_s=20.0),
        Survived(planned=serving, step=5, at=0.0, next_step_s=70.0, next_load_s=60.0),
    ]
    summary = script.summarize(Outcome(survived=survived, report=make_report(), launches=2, seconds=99.96), seed=7)
    assert summary["faults_by_kind"] == {"kill": 3}
    assert summary["training_killed_to_next_step_s"] == {"median": 15.0, "min": 10.0, "max": 20.0}
    assert summary["inference_killed_to_serving_s"] == {"median": 60.0, "min": 60.0, "max": 60.0}
    assert (summary["seconds"], summary["launches"], summary["steps"]) == (100.0, 2, 12)


def make_report() -> RunHistory:
    report = RunHistory(Outline(start_steps=frozenset(), has_orchestrator=True), max_off_policy_steps=1)
    report.last_step, report.starts["trainer"] = Step(12), 3
    return report


def test_a_time_that_never_came_is_left_out():
    assert script.spread([None, None]) is None
    assert script.spread([None, 3.04]) == pytest.approx({"median": 3.0, "min": 3.0, "max": 3.0})
