from pathlib import Path

import pytest

from trivet.checkpoints.commit import commit
from trivet.checkpoints.parts import TRAINER, begin_part, finish_part
from trivet.config.layout import RunLayout
from trivet.trainer.policy_retention import PolicyRetention
from trivet.weights.catalog import published_versions
from trivet.weights.publish import publish
from trivet.weights.retention import LiveReaders, acknowledge
from trivet.wire.events import Retire
from trivet.wire.versions import PolicyVersion, Step


def write_weights(directory: Path) -> None:
    (directory / "weights").write_bytes(b"w")


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path)
    for version in range(1, 7):
        publish(
            layout,
            version=PolicyVersion(version),
            run_id="run",
            write=write_weights,
        )
    return layout


def make_retention(layout: RunLayout, **changes: object) -> PolicyRetention:
    fields = {"from_step": Step(0), "keep_recent": 1, "resume_lag": 0, "reference_interval": None, "keep_interval": None}
    return PolicyRetention(layout=layout, readers=LiveReaders(layout), **(fields | changes))


def commit_step(layout: RunLayout, step: int) -> None:
    (begin_part(layout, Step(step), TRAINER) / "state").write_text("x")
    finish_part(layout, Step(step), TRAINER)
    commit(layout, Step(step), parts=(TRAINER,))


def test_the_newest_policies_stay(layout: RunLayout) -> None:
    assert make_retention(layout).find_unneeded(step=6, newest_checkpoint=None) == [1, 2, 3, 4]
    assert make_retention(layout, keep_recent=3).find_unneeded(step=6, newest_checkpoint=None) == [1, 2]


def test_everything_from_the_oldest_reader_on_stays(layout: RunLayout) -> None:
    acknowledge(layout, "server", PolicyVersion(3))
    assert make_retention(layout).find_unneeded(step=6, newest_checkpoint=None) == [1, 2]


def test_policies_of_checkpoints_and_of_the_one_that_is_begun_stay(layout: RunLayout) -> None:
    commit_step(layout, 2)
    assert make_retention(layout, from_step=Step(1)).find_unneeded(step=6, newest_checkpoint=Step(4)) == [3]


def test_policies_that_a_resume_samples_from_stay(layout: RunLayout) -> None:
    commit_step(layout, 4)
    assert make_retention(layout, resume_lag=2).find_unneeded(step=6, newest_checkpoint=None) == [1]


def test_references_of_checkpoints_and_of_those_to_come_stay(layout: RunLayout) -> None:
    commit_step(layout, 3)
    retention = make_retention(layout, reference_interval=2, keep_recent=0)
    assert retention.find_unneeded(step=5, newest_checkpoint=None) == [1, 5]


def test_multiples_of_the_users_interval_stay(layout: RunLayout) -> None:
    assert make_retention(layout, keep_interval=2).find_unneeded(step=6, newest_checkpoint=None) == [1, 3]


def test_what_nobody_needs_is_removed_and_recorded(layout: RunLayout, telemetry) -> None:
    make_retention(layout).retire_unneeded(telemetry, step=6, newest_checkpoint=None)
    assert published_versions(layout) == [5, 6]
    assert telemetry.events == [Retire(version=PolicyVersion(version)) for version in (1, 2, 3, 4)]
