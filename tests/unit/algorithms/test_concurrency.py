from hypothesis import given
from hypothesis import strategies as st

from trivet.algorithms.concurrency import LoadSince, TokenBucket, next_limit

counts = st.integers(0, 10_000)


def load(*, running: int, waiting: int = 0, preempted: int = 0) -> LoadSince:
    return LoadSince(num_running=running, num_waiting=waiting, num_preempted=preempted)


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
    assert next_limit(100, load(running=80, waiting=5, preempted=3), in_flight=100, floor=16, ceiling=100) == 80


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
