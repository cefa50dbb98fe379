import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.algorithms.dispatching import (
    CombinedLoad,
    TokenBucket,
    has_capacity,
    is_stale,
    may_dispatch,
    next_limit,
    required_version,
    staleness,
    target_version,
)

counts = st.integers(0, 10_000)


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


def load(*, running: int, waiting: int = 0, preempted: int = 0, kv_usage: float = 0.5) -> CombinedLoad:
    is_free = has_capacity(num_running=running, num_waiting=waiting, kv_usage=kv_usage)
    return CombinedLoad(num_running=running, num_waiting=waiting, num_preempted=preempted, has_capacity=is_free)


@given(
    limit=st.integers(1, 10_000), running=counts, waiting=counts, preempted=counts, in_flight=counts, floor=st.integers(1, 64)
)
def test_the_limit_stays_between_floor_and_ceiling(limit, running, waiting, preempted, in_flight, floor):
    after = next_limit(
        limit, load(running=running, waiting=waiting, preempted=preempted), in_flight=in_flight, floor=floor, ceiling=10_000
    )
    assert floor <= after <= 10_000


@given(running=st.integers(0, 500), waiting=st.integers(0, 500), scoring=st.integers(0, 500))
def test_a_queue_never_takes_a_place_from_what_runs(running, waiting, scoring):
    in_flight = running + waiting + scoring
    limit = max(in_flight, 1)
    after = next_limit(limit, load(running=running, waiting=waiting), in_flight=in_flight, floor=1, ceiling=2_000)
    assert after >= running + scoring


def test_a_run_that_fits_keeps_everything_that_is_allowed():
    assert next_limit(128, load(running=128), in_flight=128, floor=16, ceiling=128) == 128


def test_sequences_thrown_out_of_the_cache_cut_the_limit():
    seen = load(running=80, waiting=5, preempted=3, kv_usage=0.97)
    assert next_limit(100, seen, in_flight=100, floor=16, ceiling=100) == 85
    assert next_limit(60, seen, in_flight=100, floor=16, ceiling=100) == 60, "it was cut before, and rollouts still end"


def test_a_server_that_preempts_leaves_the_limit_to_others_that_have_capacity():
    seen = CombinedLoad(num_running=80, num_waiting=5, num_preempted=3, has_capacity=True)
    assert next_limit(100, seen, in_flight=100, floor=16, ceiling=200) == 110


def test_a_cache_that_is_nearly_full_gets_no_more_before_it_preempts():
    assert next_limit(100, load(running=100, kv_usage=0.95), in_flight=100, floor=16, ceiling=200) == 100
    assert next_limit(100, load(running=100, kv_usage=0.5), in_flight=100, floor=16, ceiling=200) == 110


def test_a_long_queue_is_cut_down_to_a_quarter_of_what_runs():
    limit = 1000
    for _ in range(50):
        limit = next_limit(limit, load(running=64, waiting=limit - 64), in_flight=limit, floor=16, ceiling=1000)
    assert 80 <= limit <= 128


def test_the_limit_grows_back_only_while_it_is_what_holds_rollouts_back():
    assert next_limit(50, load(running=50), in_flight=50, floor=16, ceiling=100) == 55
    assert next_limit(50, load(running=30), in_flight=30, floor=16, ceiling=100) == 50
    assert next_limit(50, load(running=30, waiting=20), in_flight=50, floor=16, ceiling=100) == 50


def test_a_server_of_any_capacity_is_kept_full():
    for capacity in (8, 64, 300):
        limit = 512
        for _ in range(100):
            running = min(limit, capacity)
            limit = next_limit(limit, load(running=running, waiting=limit - running), in_flight=limit, floor=4, ceiling=512)
            assert limit >= capacity


def test_a_bucket_lets_no_more_through_than_its_rate_and_one_burst():
    bucket = TokenBucket(per_minute=120, burst=10, now=0.0)
    now, started = 0.0, 0
    while now < 300:
        wait_s = bucket.wait_s(4, now=now)
        if wait_s:
            now += wait_s
            continue
        bucket.take(4)
        started += 4
    assert 2 * 300 - 4 <= started <= 2 * 300 + 10 + 4


def test_an_idle_bucket_saves_up_one_burst_and_no_more():
    bucket = TokenBucket(per_minute=60, burst=6, now=0.0)
    assert bucket.wait_s(6, now=1000.0) == 0
    bucket.take(6)
    assert bucket.wait_s(3, now=1000.0) == 3.0
