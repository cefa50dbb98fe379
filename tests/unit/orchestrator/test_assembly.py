import numpy as np
import pytest

from support.groups import make_sample
from support.transport_ends import make_batch
from trivet.config.layout import MANIFEST, STABLE, RunLayout
from trivet.orchestrator.assembly import is_trained, usable_groups
from trivet.orchestrator.buffer import BufferState
from trivet.orchestrator.sampler import Draw
from trivet.wire.batches import BatchPurpose
from trivet.wire.rollouts import Group, Rollout
from trivet.wire.versions import GroupId, Step


def group(group_id: int, *, is_scored: bool = False) -> Group:
    sample = make_sample()
    if is_scored:
        sample.teacher_logprobs_T = np.zeros(sample.num_tokens, dtype=np.float32)
    return Group(group_id=GroupId(group_id), env="toy", example_id=0, rollouts=[Rollout(index=0, reward=1.0, samples=[sample])])


WAITING = BufferState(
    ready=[group(1), group(2, is_scored=True)],
    in_flight=[Draw(group_id=GroupId(3), env="toy", example_id=0, example_hash="h", step=Step(1))],
)


def test_a_skipped_buffer_leaves_out_every_group():
    assert usable_groups(WAITING, skip=True, has_teacher=True) == (BufferState(), dict.fromkeys([1, 2, 3], "ckpt.skip_buffer"))


def test_groups_that_finished_before_the_run_had_a_teacher_are_left_out():
    kept, left_out = usable_groups(WAITING, skip=False, has_teacher=True)
    assert [one.group_id for one in kept.ready] == [2]
    assert kept.in_flight == WAITING.in_flight
    assert left_out == {1: "no_teacher_logprobs"}


@pytest.mark.parametrize(
    ("purpose", "step", "expected"),
    [
        (BatchPurpose.TRAIN, 6, True),
        (BatchPurpose.TRAIN, 7, True),
        (BatchPurpose.TRAIN, 8, False),
        (BatchPurpose.PROBE, 7, False),
        (BatchPurpose.PREEMPT, 7, False),
    ],
)
def test_a_published_policy_shows_that_the_trainer_had_the_batches_up_to_it(tmp_path, purpose, step, expected):
    layout = RunLayout(tmp_path)
    for version in (6, 7, 8):
        layout.weights_step(version).mkdir(parents=True)
        (layout.weights_step(version) / MANIFEST).touch()
    for version in (6, 7):
        (layout.weights_step(version) / STABLE).touch()

    assert is_trained(make_batch(step, purpose=purpose), layout) is expected


def test_without_a_policy_no_batch_is_known_to_have_arrived(tmp_path):
    assert not is_trained(make_batch(1), RunLayout(tmp_path))
