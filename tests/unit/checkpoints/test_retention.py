import pytest

from trivet.checkpoints.commit import committed_steps, removable_steps, remove_checkpoint
from trivet.config.layout import COMMITTED, RunLayout
from trivet.storage.durable import write_atomically


@pytest.mark.parametrize(
    ("keep_last", "keep_interval", "expected"),
    [
        (None, None, []),
        (2, None, [10, 20, 30]),
        (1, 20, [10, 30]),
        (None, 20, [10, 30]),
        (None, 7, [10, 20, 30, 40]),
        (9, None, []),
    ],
)
def test_the_newest_and_the_multiples_stay(keep_last, keep_interval, expected):
    assert removable_steps([10, 20, 30, 40, 50], keep_last=keep_last, keep_interval=keep_interval) == expected


def test_a_removed_checkpoint_leaves_no_trace(tmp_path):
    layout = RunLayout(tmp_path)
    for step in (1, 2):
        write_atomically(layout.checkpoint_step(step) / COMMITTED, b"{}")
    remove_checkpoint(layout, 1)
    assert committed_steps(layout) == [2]
    assert [path.name for path in layout.checkpoints.iterdir()] == ["step_2"]
