import numpy as np

from support.groups import make_sample
from trivet.orchestrator.assembly import usable_groups
from trivet.orchestrator.buffer import BufferState
from trivet.orchestrator.sampler import Draw
from trivet.wire.rollouts import Group, Rollout
from trivet.wire.versions import GroupId, Step


def group(group_id: int, *, is_taught: bool = False) -> Group:
    sample = make_sample()
    if is_taught:
        sample.teacher_logprobs_T = np.zeros(sample.num_tokens, dtype=np.float32)
    return Group(group_id=GroupId(group_id), env="toy", example_id=0, rollouts=[Rollout(index=0, reward=1.0, samples=[sample])])


WAITING = BufferState(
    ready=[group(1), group(2, is_taught=True)],
    in_flight=[Draw(group_id=GroupId(3), env="toy", example_id=0, example_hash="h", step=Step(1))],
)


def test_a_skipped_buffer_leaves_out_every_group():
    assert usable_groups(WAITING, skip=True, has_teacher=True) == (BufferState(), dict.fromkeys([1, 2, 3], "ckpt.skip_buffer"))


def test_groups_that_finished_before_the_run_had_a_teacher_are_left_out():
    kept, left_out = usable_groups(WAITING, skip=False, has_teacher=True)
    assert [one.group_id for one in kept.ready] == [2]
    assert kept.in_flight == WAITING.in_flight
    assert left_out == {1: "no_teacher_logprobs"}
