import math

import pytest

from support.groups import make_group, make_sample
from trivet.orchestrator.buffer import FinishedGroup, GroupCounters, LostGroup
from trivet.orchestrator.filters import FilterReason, RolloutFilter
from trivet.orchestrator.metrics import batch_metrics, flow_metrics
from trivet.wire.rollouts import Group
from trivet.wire.versions import PolicyVersion, Step


def group_of(env: str, rewards: tuple[float, ...], *, version: int = 0, newest: int | None = None) -> Group:
    group = make_group(0, rewards, version=version, newest=newest)
    group.env = env
    return group


def flow(counters: GroupCounters, groups: list[Group]) -> dict[str, float]:
    return flow_metrics(counters, groups, version=PolicyVersion(1), step=Step(3), group_size=2, num_in_flight=5, num_ready=2)


def test_a_batch_of_one_environment_is_told_once():
    values = batch_metrics([group_of("math", (0.0, 1.0))], step=Step(1), num_tokens=14)
    assert values["reward/mean"] == values["reward/math"] == 0.5
    assert values["batch/math"] == 1.0
    assert (values["completion_len/mean"], values["prompt_len/max"], values["seq_len/max"]) == (4.0, 3.0, 7.0)
    assert (values["progress/samples"], values["progress/problems"], values["progress/tokens"]) == (2.0, 1.0, 14.0)
    assert not any(name.endswith("/mean/math") for name in values)
    assert all(math.isfinite(value) for value in values.values())


def test_with_several_environments_each_has_its_numbers():
    groups = [group_of("math", (0.0, 1.0)), group_of("code", (1.0, 1.0)), group_of("math", (0.0, 0.0))]
    groups[1].rollouts[0].scores = {"tests": 3.0}
    groups[1].rollouts[0].samples = [make_sample(completion=10)]
    groups[1].rollouts[0].samples[0].temperature = 0.5
    values = batch_metrics(groups, step=Step(1), num_tokens=48)
    assert (values["reward/math"], values["reward/code"]) == (0.25, 1.0)
    assert values["batch/code"] == pytest.approx(1 / 3)
    assert values["completion_len/mean/code"] == 7.0
    assert values["metrics/tests"] == values["metrics/tests/code"] == 3.0
    assert "metrics/tests/math" not in values
    assert values["sampling/temperature/math"] == 1.0
    assert values["sampling/temperature/code"] == 0.75


def test_groups_that_differ_by_rounding_alone_are_flat_and_leave_no_share_that_differs() -> None:
    groups = [group_of("math", (0.7 + 0.2 + 0.1, 1.0)), group_of("math", (0.0, 0.0)), group_of("math", (0.0, -1e-17))]
    values = flow(GroupCounters(), groups)
    assert values["batch/effective_batch_size"] == 0.0  # 1 - 2/3 - 1/3 is 5.6e-17
    assert (values["batch/solve_all"], values["batch/solve_none"]) == (1 / 3, 2 / 3)
    assert (values["pass@1"], values["pass@2"]) == (1 / 3, 1 / 3)


def test_staleness_is_counted_token_by_token():
    groups = [group_of("math", (0.0, 1.0), version=3), group_of("math", (0.0, 1.0), version=1, newest=4)]
    values = batch_metrics(groups, step=Step(5), num_tokens=28)
    assert {name: value for name, value in values.items() if "off_policy_tokens" in name} == {
        "batch/off_policy_tokens/0": 2.0,
        "batch/off_policy_tokens/1": 8.0,
        "batch/off_policy_tokens/3": 6.0,
    }
    assert (values["batch/off_policy_level/min"], values["batch/off_policy_level/max"]) == (1.0, 3.0)


def test_groups_that_tell_nothing_apart_count_as_solved_or_not():
    counters = GroupCounters()
    for rewards in ((1.0, 1.0), (0.0, 0.0), (0.0, 0.0)):
        counters.finished.append(FinishedGroup.of(group_of("math", rewards), filtered=FilterReason.ZERO_SIGNAL))
    batch = [group_of("math", (0.0, 1.0))]
    counters.finished.append(FinishedGroup.of(batch[0], matches=[RolloutFilter.TRUNCATED]))
    values = flow(counters, batch)
    assert (values["batch/solve_none"], values["batch/solve_all"], values["batch/effective_batch_size"]) == (0.5, 0.25, 0.25)
    assert (values["pass@1"], values["pass@2"]) == (0.375, 0.5)
    assert (values["filtered_rollouts/easy"], values["filtered_rollouts/hard"]) == (0.25, 0.5)
    assert values["filtered_rollouts/truncated"] == 0.125
    assert values["filtered_rollouts/repetition"] == 0.0
    assert values["batch/filtered_groups"] == 3.0
    assert values["batch/overlong_prompts"] == 0.0


def test_failures_are_told_by_error_and_environment():
    counters = GroupCounters()
    counters.finished.append(FinishedGroup.of(group_of("math", (0.0, 1.0))))
    counters.failed.append(LostGroup(env="math", reason="ValueError"))
    counters.failed.append(LostGroup(env="code", reason="ValueError"))
    counters.failed.append(LostGroup(env="code", reason="WorkerLost", is_infrastructure=True))
    counters.dropped.append(LostGroup(env="code", reason="stale"))
    values = flow(counters, [])
    assert (values["error/mean"], values["error/ValueError"], values["error/code/WorkerLost"]) == (0.75, 0.5, 0.25)
    assert (values["error/infrastructure"], values["error/environment"]) == (0.25, 0.5)
    assert (values["batch/stale_groups"], values["batch/cancelled_rollouts"], values["batch/inflight_rollouts"]) == (
        1.0,
        2.0,
        10.0,
    )
