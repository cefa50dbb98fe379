"""The bias ledger, on histories whose means are known."""

import json
from pathlib import Path

import numpy as np
import pytest

from support.groups import NO_FILTERS, make_group
from support.histories import write_events
from trivet.cli.main import main
from trivet.config.layout import RunLayout
from trivet.history.selection import TRAINED, EndedGroup, add_difficulty, follow_groups, measure_selection, read_ended_groups
from trivet.orchestrator.checkpoint import write_rollouts
from trivet.orchestrator.filters import mask_rollouts
from trivet.wire.events import AnyEvent, BatchFormed, Dispatch, Drop, Filter, Finish, Start
from trivet.wire.versions import GroupId, PolicyVersion, Step


def start(from_step: int = 0, *, attempt: int = 1) -> AnyEvent:
    return Start(role="orchestrator", attempt=attempt, run_id="run", from_step=Step(from_step))


def dispatch(group_id: int, *, time: float = 0.0, example_id: int | None = None) -> AnyEvent:
    example = group_id if example_id is None else example_id
    return Dispatch(time=time, group_id=GroupId(group_id), env="toy", example_id=example, version=PolicyVersion(0))


def finish(group_id: int, reward: float, *, time: float = 1.0, tokens: float | None = 10.0) -> AnyEvent:
    version = PolicyVersion(0)
    return Finish(
        time=time,
        group_id=GroupId(group_id),
        reward_mean=reward,
        oldest_version=version,
        newest_version=version,
        completion_tokens=tokens,
    )


def batch(step: int, *group_ids: int) -> AnyEvent:
    version, ids = PolicyVersion(0), [GroupId(group_id) for group_id in group_ids]
    return BatchFormed(step=Step(step), group_ids=ids, oldest_version=version, newest_version=version)


def test_the_effects_of_the_causes_add_up_to_the_bias() -> None:
    events: list[AnyEvent] = [start()]
    for group_id, (reward, tokens, seconds) in enumerate([(1, 10, 2), (0.5, 20, 4), (0, 60, 9), (0, 90, 30)]):
        events += [dispatch(group_id), finish(group_id, reward, tokens=tokens, time=seconds)]
    events += [
        Filter(group_id=GroupId(2), reason="zero_signal"),
        Drop(group_id=GroupId(3), reason="stale"),
        dispatch(4, time=5.0),
        Drop(group_id=GroupId(4), reason="failed: Error: no", time=11.0),
        batch(1, 0, 1),
    ]
    groups, steps = follow_groups(events)
    report = measure_selection(list(groups.values()))
    assert steps == {1: 5}
    assert report.num_groups == {"filtered: zero_signal": 1, "stale": 1, "failed": 1, TRAINED: 2}
    biases = {bias.quantity: bias for bias in report.biases}
    assert biases["tokens"].bias == pytest.approx(15 - 45)
    assert biases["reward"].bias == pytest.approx(0.75 - 0.375)
    assert biases["latency_s"].bias == pytest.approx(3 - (2 + 4 + 9 + 30 + 6) / 5)
    assert biases["tokens"].num_unknown == 1
    effects = {cause.cause: cause.effect for cause in biases["tokens"].causes}
    assert effects == {
        TRAINED: 0,
        "filtered: zero_signal": pytest.approx((15 - 60) / 4),
        "stale": pytest.approx((15 - 90) / 4),
    }
    for bias in report.biases:
        assert sum(cause.effect for cause in bias.causes) == pytest.approx(bias.bias, abs=1e-12)
        assert bias.bias == pytest.approx(bias.trained_mean - bias.sampled_mean, abs=1e-12)


def test_a_resume_voids_what_came_after_its_step() -> None:
    before = [start(), dispatch(0), finish(0, 1.0), dispatch(1), finish(1, 0.2), batch(1, 0)]
    lost = [Drop(group_id=GroupId(1), reason="stale"), dispatch(2), finish(2, 0.0), Filter(group_id=GroupId(2), reason="x")]
    groups, _ = follow_groups([*before, *lost, batch(2, 2), start(1, attempt=2), batch(2, 1)])
    assert {group_id: group.cause for group_id, group in groups.items()} == {0: TRAINED, 1: TRAINED}


def ended(group_id: int, *, example_id: int = 0, cause: str = TRAINED, **values: float) -> EndedGroup:
    return EndedGroup(group_id=group_id, env="toy", example_id=example_id, started=0.0, cause=cause, values=values)


def test_difficulty_is_that_of_the_other_groups_of_the_example() -> None:
    groups = [ended(0, reward=1.0), ended(1, reward=0.0), ended(2, cause="failed"), ended(3, example_id=1, reward=1.0)]
    add_difficulty(groups)
    assert [group.values.get("difficulty") for group in groups] == [0.0, -1.0, -0.5, None]


@pytest.mark.parametrize("drops_long", [True, False])
def test_dropping_long_and_hard_groups_is_warned_of_and_dropping_at_random_is_not(drops_long: bool) -> None:
    rng = np.random.default_rng(0)
    groups: list[EndedGroup] = []
    for index, tokens in enumerate(rng.gamma(2.0, 50.0, 600).tolist()):
        is_dropped = tokens > 120 if drops_long else index % 5 == 0
        reward = float(rng.random() < 50 / (50 + tokens))
        groups.append(ended(index, example_id=index, cause="stale" if is_dropped else TRAINED, tokens=tokens, reward=reward))
    report = measure_selection(groups)
    assert [warning.split(":")[0] for warning in report.warnings] == (
        ["dropping favours short rollouts", "dropping favours easy rollouts"] if drops_long else []
    )
    (tokens_bias,) = [bias for bias in report.biases if bias.quantity == "tokens"]
    assert tokens_bias.interval[0] < tokens_bias.bias < tokens_bias.interval[1]


def test_masked_rollouts_of_a_trained_group_count_as_their_share_of_it(tmp_path: Path, capsys) -> None:
    layout = RunLayout(tmp_path)
    group = make_group(0, rewards=(1.0, 0.0, 0.0, 0.0))
    group.rollouts[3].samples[0].logprobs_T[:] = 0.0
    group.rollouts[3].samples[0].is_truncated = True
    mask_rollouts(group, NO_FILTERS, masks_truncated=True)
    write_rollouts(layout, Step(1), [group], run_id="run")
    write_events(layout.events, [start(), dispatch(0), finish(0, 0.25), batch(1, 0)])
    trained, masked = read_ended_groups(layout)
    assert (trained.cause, trained.share, trained.values["reward"]) == (TRAINED, 0.75, pytest.approx(1 / 3))
    assert (masked.cause, masked.share, masked.values) == ("truncated", 0.25, {"latency_s": 1.0, "tokens": 4.0, "reward": 0.0})
    assert main(["selection", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (reward,) = [bias for bias in report["biases"] if bias["quantity"] == "reward"]
    assert (reward["sampled_mean"], reward["trained_mean"]) == (pytest.approx(0.25), pytest.approx(1 / 3))
