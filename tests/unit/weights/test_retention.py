import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.config.layout import RunLayout
from trivet.errors import WeightsError
from trivet.weights.catalog import published_versions
from trivet.weights.publish import publish
from trivet.weights.retention import (
    LiveReaders,
    acknowledge,
    forget_reader,
    needed_to_resume,
    retirable,
    retire,
)

SERVER = "http://127.0.0.1:8000/v1"


@pytest.fixture
def layout(tmp_path):
    return RunLayout(tmp_path)


def test_old_versions_go_once_readers_moved_on():
    assert retirable([1, 2, 3, 4], latest=4, keep_recent=1, in_use=[4], kept=[]) == [1, 2]


def test_a_slow_reader_keeps_what_it_holds_and_all_it_may_load_next():
    assert retirable([1, 2, 3, 4, 5], latest=5, keep_recent=0, in_use=[5, 3], kept=[]) == [1, 2]


def test_checkpointed_steps_and_multiples_of_the_interval_stay():
    assert retirable([1, 2, 3, 4, 5], latest=5, keep_recent=0, in_use=[5], kept=[2, 4]) == [1, 3]
    assert retirable([1, 2, 3, 4, 5], latest=5, keep_recent=0, in_use=[5], kept=[1], keep_interval=3) == [2, 4]


def test_a_resume_needs_the_policies_of_its_first_batch_and_none_before_the_start_model():
    assert needed_to_resume([1, 5], lag=2) == {0, 1, 3, 4, 5}


def test_a_reader_that_still_serves_the_start_model_keeps_everything():
    assert retirable([1, 2, 3], latest=3, keep_recent=0, in_use=[0], kept=[]) == []


@given(
    published=st.sets(st.integers(1, 30), min_size=1),
    keep_recent=st.integers(0, 4),
    held=st.lists(st.integers(0, 30), max_size=4),
    kept=st.sets(st.integers(1, 30)),
)
def test_nothing_needed_is_ever_retired(published, keep_recent, held, kept):
    latest = max(published)
    gone = retirable(sorted(published), latest=latest, keep_recent=keep_recent, in_use=held, kept=kept)
    assert latest not in gone
    assert not set(gone) & kept
    assert not set(gone) & set(held)
    assert all(version < latest - keep_recent for version in gone)
    assert all(version < reader for version in gone for reader in held)
    assert set(gone) <= published


def test_a_retired_version_leaves_no_trace(layout):
    for version in (1, 2):
        publish(layout, version=version, run_id="run", write=lambda path: (path / "model.safetensors").touch())
    retire(layout, 1)
    retire(layout, 1)
    assert published_versions(layout) == [2]
    assert [path.name for path in layout.weights.iterdir()] == ["step_2"]


def test_readers_are_remembered_by_name_whatever_characters_it_has(layout):
    assert LiveReaders(layout).versions() == {}
    acknowledge(layout, SERVER, 1)
    acknowledge(layout, SERVER, 2)
    acknowledge(layout, "server_1", 1)
    assert LiveReaders(layout).versions() == {SERVER: 2, "server_1": 1}


def test_an_unreadable_acknowledgement_is_named(layout):
    layout.readers.mkdir(parents=True)
    (layout.readers / "server_1.json").write_text("{}")
    with pytest.raises(WeightsError, match=r"server_1\.json is not an acknowledgement.*remove it"):
        LiveReaders(layout).versions()


def test_a_reader_that_comes_and_goes_counts_for_its_time_or_until_it_is_forgotten(layout):
    now = 5.0
    readers = LiveReaders(layout, clock=lambda: now)
    acknowledge(layout, "killed", 1, lifetime_s=600.0)
    acknowledge(layout, "reading", 2, lifetime_s=600.0)
    acknowledge(layout, SERVER, 3)
    assert readers.versions() == {"killed": 1, "reading": 2, SERVER: 3}
    now += 500.0
    acknowledge(layout, "reading", 2, lifetime_s=600.0)
    assert readers.versions() == {"killed": 1, "reading": 2, SERVER: 3}
    now += 500.0
    assert readers.versions() == {"reading": 2, SERVER: 3}
    forget_reader(layout, "reading")
    forget_reader(layout, "reading")
    assert readers.versions() == {SERVER: 3}


@pytest.mark.parametrize("offset_s", [-3600.0, 3600.0])
def test_a_reader_whose_clock_differs_from_the_trainers_counts_as_long_as_any_other(layout, monkeypatch, offset_s):
    now, true_time = 5.0, time.time
    readers = LiveReaders(layout, clock=lambda: now)
    monkeypatch.setattr(time, "time", lambda: true_time() + offset_s)
    acknowledge(layout, "elsewhere", 1, lifetime_s=600.0)
    monkeypatch.undo()
    assert readers.versions() == {"elsewhere": 1}
    now += 601.0
    assert readers.versions() == {}
