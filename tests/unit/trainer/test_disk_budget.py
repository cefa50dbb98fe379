"""Compare the estimates of disk space with a count of what a run leaves step by step."""

import itertools

import pytest

from trivet.checkpoints.commit import removable_steps
from trivet.config.schema.shared import CkptConfig, CkptWeightsConfig
from trivet.trainer.disk_budget import Sizes, estimate
from trivet.wire.versions import Step

SIZES = Sizes(checkpoint=1000, weights=1)


def most_checkpoints(ckpt: CkptConfig, *, from_step: int, max_steps: int) -> int:
    """Return the largest number of checkpoints on disk at one time, including the one being written."""
    committed: list[Step] = []
    most = 0
    for step in range(from_step + 1, max_steps + 1):
        if ckpt.is_due(step, max_steps=max_steps):
            committed.append(Step(step))
            most = max(most, len(committed))
            for old in removable_steps(committed, keep_last=ckpt.keep_last, keep_interval=ckpt.keep_interval):
                committed.remove(old)
    return most


@pytest.mark.parametrize(
    ("interval", "keep_last", "keep_interval", "from_step"),
    list(itertools.product([None, 1, 3], [None, 1, 2, 50], [None, 6], [0, 7])),
)
def test_the_estimate_covers_every_checkpoint_that_lies_there_at_one_time(
    interval: int | None, keep_last: int | None, keep_interval: int | None, from_step: int
) -> None:
    ckpt = CkptConfig(interval=interval, keep_last=keep_last, keep_interval=keep_interval)
    _, total = estimate(ckpt, SIZES, from_step=from_step, max_steps=20, keep_recent=1)
    assert total is not None
    assert 0 <= total // 1000 - most_checkpoints(ckpt, from_step=from_step, max_steps=20) <= 1


def test_policies_are_those_of_checkpoints_of_the_interval_and_the_recent_ones() -> None:
    ckpt = CkptConfig(interval=10, weights=CkptWeightsConfig(interval=5))
    minimum, total = estimate(ckpt, Sizes(checkpoint=0, weights=1), from_step=0, max_steps=20, keep_recent=1)
    assert total == 4 + 4  # 5, 10, 15, 20; the newest, two for servers that lag until it counts, one being written
    assert minimum == 4


def test_a_run_without_an_end_has_a_minimum_alone() -> None:
    assert estimate(CkptConfig(interval=1), SIZES, from_step=0, max_steps=None, keep_recent=1) == (1004, None)
