import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.algorithms.staleness import is_stale, may_dispatch, required_version, staleness, target_version


def test_staleness_counts_from_the_policy_that_the_batch_is_trained_on():
    assert staleness(step=5, oldest=4) == 0
    assert staleness(step=5, oldest=2) == 2


@pytest.mark.parametrize(("oldest", "expected"), [(4, False), (2, False), (1, True)])
def test_a_sample_is_stale_beyond_the_limit_not_at_it(oldest, expected):
    assert is_stale(step=5, oldest=oldest, max_off_policy_steps=2) is expected


@pytest.mark.parametrize(("step", "level", "expected"), [(1, 0, 0), (1, 1, 0), (2, 1, 0), (3, 1, 1), (3, 0, 2), (3, 9, 0)])
def test_required_version_lags_by_the_async_level(step, level, expected):
    assert required_version(step=step, max_async_level=level) == expected


def test_servers_take_the_newest_policy_unless_timing_must_not_matter():
    assert target_version(step=5, latest=4, max_async_level=2, is_strict=False) == 4
    assert target_version(step=5, latest=4, max_async_level=2, is_strict=True) == 2
    assert target_version(step=5, latest=1, max_async_level=2, is_strict=False) == 2


def test_without_async_no_rollout_starts_for_a_later_batch():
    may = [may_dispatch(step=3, version=2, rollouts_ahead=ahead, rollouts_per_step=8, max_async_level=0) for ahead in (0, 7, 8)]
    assert may == [True, True, False]


def test_one_level_of_async_lets_one_batch_be_filled_ahead():
    may = [may_dispatch(step=3, version=2, rollouts_ahead=ahead, rollouts_per_step=8, max_async_level=1) for ahead in (15, 16)]
    assert may == [True, False]
    assert not may_dispatch(step=3, version=0, rollouts_ahead=0, rollouts_per_step=8, max_async_level=1)


@given(st.integers(1, 50), st.integers(0, 60), st.integers(0, 100), st.integers(1, 16), st.integers(0, 4))
def test_what_may_start_is_recent_enough_for_the_batch_it_lands_in(step, version, ahead, per_step, level):
    if may_dispatch(step=step, version=version, rollouts_ahead=ahead, rollouts_per_step=per_step, max_async_level=level):
        assert staleness(step=step + ahead // per_step, oldest=version) <= level
