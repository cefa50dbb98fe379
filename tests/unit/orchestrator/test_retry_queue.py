"""When a group whose try was lost is tried again, and when no more."""

from support.groups import make_draw
from trivet.orchestrator.retry_queue import RetryQueue


def test_the_second_try_follows_at_once_and_each_later_one_after_twice_the_pause():
    retries, pauses = RetryQueue(), list[float]()
    for lost_tries in (1, 2, 3, 4):
        assert retries.add(make_draw(7), lost_tries=lost_tries, now=100.0)
        pauses.append(retries.wait_s(100.0, otherwise=-1.0))
        assert retries.is_due(100.0 + pauses[-1])
        assert retries.is_due(100.0) == (pauses[-1] == 0.0)
        assert retries.take().number == lost_tries + 1
    assert pauses == [0.0, 1.0, 2.0, 4.0]


def test_after_the_fifth_try_nothing_is_queued():
    retries = RetryQueue()
    assert not retries.add(make_draw(7), lost_tries=5, now=0.0)
    assert not retries
    assert not retries.is_due(1e9)
    assert retries.wait_s(0.0, otherwise=5.0) == 5.0


def test_groups_are_tried_again_in_the_order_in_which_their_tries_were_lost():
    retries = RetryQueue()
    retries.add(make_draw(9), lost_tries=2, now=0.0)
    retries.add(make_draw(3), lost_tries=1, now=0.5)
    assert not retries.is_due(0.5)
    assert [retries.take().draw.group_id, retries.take().draw.group_id] == [9, 3]
