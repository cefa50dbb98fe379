"""Garbage collection is off while the loop runs, and as before afterwards."""

import gc

import pytest

from trivet.orchestrator.garbage import rare_collections
from trivet.wire.rollouts import Group, GroupId, Rollout


def test_full_collections_do_not_happen_by_themselves():
    before = gc.get_threshold()
    with rare_collections():
        full = gc.get_stats()[2]["collections"]
        kept = [[index] for index in range(400_000)]
        assert gc.get_stats()[2]["collections"] == full
        assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
    assert len(kept) == 400_000


def test_the_collector_is_as_before_when_the_loop_fails():
    before = gc.get_threshold()
    with pytest.raises(RuntimeError), rare_collections():
        raise RuntimeError
    assert gc.get_threshold() == before


def test_rollouts_are_nothing_to_the_collector():
    group = Group(group_id=GroupId(1), env="e", example_id=0, rollouts=[Rollout(index=0, reward=1.0)])
    assert not gc.is_tracked(group)
    assert not gc.is_tracked(group.rollouts[0])
