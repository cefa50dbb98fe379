import pytest

from trivet.backoff import backoff_s


def test_the_pause_starts_at_first_s_and_doubles_with_each_retry():
    assert [backoff_s(retry, first_s=0.5) for retry in (1, 2, 3, 4)] == [0.5, 1.0, 2.0, 4.0]


def test_the_pause_stays_within_its_limits():
    assert [backoff_s(retry, first_s=1.0, min_s=3.0, max_s=10.0) for retry in (1, 2, 3, 4, 5)] == [3.0, 3.0, 4.0, 8.0, 10.0]


def test_the_longest_pause_wins_over_a_shortest_one_above_it():
    assert backoff_s(1, first_s=1.0, min_s=20.0, max_s=10.0) == 10.0


def test_no_pause_stays_no_pause():
    assert backoff_s(5, first_s=0.0, max_s=60.0) == 0.0


@pytest.mark.parametrize("retry", [31, 1_000, 1_000_000])
def test_a_retry_of_any_number_has_a_finite_pause(retry):
    assert backoff_s(retry, first_s=1.0) == 2.0**30
    assert backoff_s(retry, first_s=1.0, max_s=30.0) == 30.0
