import pytest

from support.groups import NO_FILTERS, make_draw, make_group, make_sample
from trivet.orchestrator.buffer import GroupBuffer
from trivet.orchestrator.filters import RolloutFilter
from trivet.orchestrator.prompts import PromptLimits
from trivet.wire.events import BatchFormed, Dispatch, Drop, Event, Filter, Finish
from trivet.wire.rollouts import Group, Rollout
from trivet.wire.versions import GroupId, PolicyVersion, Step


@pytest.fixture
def events() -> list[Event]:
    return []


def make_buffer(events: list[Event], **changes) -> GroupBuffer:
    settings = {"online_difficulty_filtering": False, "max_off_policy_steps": 2} | changes
    return GroupBuffer(write_event=events.append, **settings)


def play(buffer: GroupBuffer, group: Group) -> None:
    buffer.dispatched(make_draw(group.group_id, env=group.env, example_id=group.example_id), version=PolicyVersion(0))
    buffer.finished(group)


def test_a_batch_takes_the_oldest_ready_groups(events):
    buffer = make_buffer(events)
    for group_id in (4, 2, 9):
        play(buffer, make_group(group_id))
    batch = buffer.take_batch(Step(1), num_groups=2)
    assert batch is not None
    assert [group.group_id for group in batch] == [4, 2]
    assert buffer.num_ready == 1
    assert events[-1] == BatchFormed(step=Step(1), group_ids=[4, 2], oldest_version=0, newest_version=0)


def masked_group() -> Group:
    group = make_group(3)
    for rollout in group.rollouts:
        rollout.samples[0].is_truncated = True
    return group


@pytest.mark.parametrize(
    ("group", "is_filtering", "reason"),
    [
        (make_group(3, rewards=(1.0, 1.0)), False, None),
        (make_group(3, rewards=(1.0, 1.0)), True, "zero_signal"),
        (Group(group_id=GroupId(3), env="toy", example_id=0, rollouts=[Rollout(index=0, reward=1.0)]), False, "no_loss_tokens"),
        (masked_group(), False, "all_masked"),
    ],
)
def test_a_group_without_signal_is_filtered_with_its_reason(events, group, is_filtering, reason):
    buffer = make_buffer(events, online_difficulty_filtering=is_filtering, filters=NO_FILTERS, masks_truncated=True)
    play(buffer, group)
    assert buffer.num_ready == (reason is None)
    assert [event.reason for event in events if isinstance(event, Filter)] == [reason] * bool(reason)
    assert buffer.counters.finished[0].filtered == reason


def overlong_group(kind: str) -> Group:
    """Return a group whose prompt the server refused, or of which the trainer sees the prompt alone."""
    if kind == "refused":
        rollouts = [Rollout(index=index, reward=0.0, ran_out_of_context=True, num_turns=0) for index in range(2)]
    else:
        rollouts = [Rollout(index=index, reward=float(index), samples=[make_sample(prompt=20)]) for index in range(2)]
    return Group(group_id=GroupId(3), env="toy", example_id=7, rollouts=rollouts)


@pytest.mark.parametrize("kind", ["refused", "cut"])
def test_a_group_whose_prompt_does_not_fit_is_filtered_with_the_arithmetic(events, kind):
    limits = PromptLimits(seq_len=20, max_tokens={"toy": 16}, context=64)
    buffer = make_buffer(events, prompt_limits=limits)
    play(buffer, overlong_group(kind))
    assert events[-1] == Filter(group_id=GroupId(3), reason="overlong_prompt")
    assert buffer.first_failure == (
        "group 3 of toy was filtered (overlong_prompt): the prompt of example 7 does not fit, and " + limits.explain("toy")
    )
    (finished,) = buffer.counters.finished
    assert (finished.example_id, finished.filtered) == (7, "overlong_prompt")


def test_a_completion_that_seq_len_cuts_in_part_is_kept(events):
    buffer = make_buffer(events, prompt_limits=PromptLimits(seq_len=21, max_tokens={"toy": 1}))
    play(buffer, overlong_group("cut"))
    assert buffer.num_ready == 1


@pytest.mark.parametrize(("oldest", "is_kept"), [(3, True), (2, False)])
def test_late_group_is_dropped_at_max_off_policy_steps(events, oldest, is_kept):
    buffer = make_buffer(events)
    play(buffer, make_group(0, version=oldest, newest=5))
    batch = buffer.take_batch(Step(6), num_groups=1)
    assert (batch is not None) is is_kept
    if not is_kept:
        assert events[-1] == Drop(group_id=GroupId(0), reason="stale")


def test_every_transition_writes_one_event(events):
    buffer = make_buffer(events)
    play(buffer, make_group(0))
    buffer.dispatched(make_draw(1), version=PolicyVersion(0))
    buffer.failed(GroupId(1), "ValueError: no", kind="ValueError")
    assert [type(event) for event in events] == [Dispatch, Finish, Dispatch, Drop]
    assert buffer.first_failure == "group 1 of toy failed: ValueError: no"


def test_snapshot_holds_what_waits_and_what_is_in_flight(events):
    buffer = make_buffer(events)
    play(buffer, make_group(5))
    buffer.dispatched(make_draw(8, example_id=1, step=3), version=PolicyVersion(0))
    state = buffer.snapshot(also_in_flight=[make_draw(7), make_draw(9)])
    assert [group.group_id for group in state.ready] == [5]
    assert state.in_flight == [make_draw(7), make_draw(8, example_id=1, step=3), make_draw(9)]


def test_the_first_error_of_a_fruitless_row_is_kept_and_forgotten_with_the_row(events):
    buffer = make_buffer(events, online_difficulty_filtering=True)
    play(buffer, make_group(0, rewards=(0.0, 0.0)))
    assert buffer.first_failure == "group 0 of toy was filtered (zero_signal): its rewards are all 0"
    for group_id, error in ((1, "ValueError: first"), (2, "ValueError: second")):
        buffer.dispatched(make_draw(group_id), version=PolicyVersion(0))
        buffer.failed(GroupId(group_id), error, kind="ValueError")
    assert buffer.first_failure.endswith("ValueError: first")
    assert buffer.fruitless_in_a_row == 3
    play(buffer, make_group(3))
    assert (buffer.first_failure, buffer.fruitless_in_a_row) == ("", 0)


def test_what_a_filter_masks_is_left_out_of_the_batch_and_keeps_the_baseline(events):
    buffer = make_buffer(events, filters=NO_FILTERS, masks_truncated=True)
    group = make_group(0, rewards=(1.0, 0.0, 0.5))
    group.rollouts[1].samples[0].is_truncated = True
    for rollout, advantage in zip(group.rollouts, (0.5, -0.5, 0.0), strict=True):
        rollout.advantage = advantage
    play(buffer, group)
    [taken] = buffer.take_batch(Step(1), num_groups=1) or []
    assert [rollout.samples[0].num_loss_tokens for rollout in taken.rollouts] == [4, 0, 4]
    assert [rollout.advantage for rollout in taken.rollouts] == [0.5, -0.5, 0.0]
    assert buffer.counters.finished[0].matches == (RolloutFilter.TRUNCATED,)
