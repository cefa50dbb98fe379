"""An agent decides from the head's answers, and from its lease, when processes and agent have to end."""

import pytest

from trivet.launcher.nodes.head_contact import HeadContact


@pytest.mark.parametrize(
    ("seen", "now", "must_end_processes", "must_end_agent"),
    [
        pytest.param({}, 15.0, False, False, id="no answer for half of the time"),
        pytest.param({}, 15.1, True, False, id="no answer for longer"),
        pytest.param({}, 60.0, True, False, id="no answer for twice the time"),
        pytest.param({}, 60.1, True, True, id="no answer for longer than that"),
        pytest.param({11: 1}, 16.0, False, False, id="the first beat was answered"),
        pytest.param({11: 1}, 16.1, True, False, id="only the first beat was answered"),
        pytest.param({19: 5}, 20.0, False, False, id="an answer that took long counts from when the beat was sent"),
        pytest.param({19: 5}, 20.1, True, False, id="it does not count from when it came"),
        pytest.param({2: 1, 5: 1, 10: 1, 14: 1}, 16.1, True, False, id="the line to the head is cut, and answers go on"),
        pytest.param({6: 5, 7: 2}, 20.0, False, False, id="an answer that was overtaken"),
        pytest.param({9: 99}, 15.1, True, False, id="a beat that was never sent"),
        pytest.param({5: 0}, 15.1, True, False, id="an answer to the introduction"),
    ],
)
def test_the_head_is_missed_when_it_has_seen_no_new_beat(
    seen: dict[int, int], now: float, must_end_processes: bool, must_end_agent: bool
) -> None:
    """Beat N is sent N seconds after the contact began, at zero. `seen`: the beats that answers name, by the second of each."""
    contact = HeadContact(lost_after_s=30.0, now=0.0)
    for second in range(1, 61):
        contact.sent(second, now=float(second))
        if second in seen:
            contact.seen(seen[second])
    assert (contact.must_end_processes(now=now), contact.must_end_agent(now=now)) == (must_end_processes, must_end_agent)


def test_a_new_connection_begins_the_time_anew() -> None:
    contact = HeadContact(lost_after_s=30.0, now=0.0)
    contact.sent(7, now=1.0)
    contact.begin(sent_at=20.0)
    assert not contact.must_end_processes(now=35.0)
    assert contact.must_end_processes(now=35.1)


def test_beats_of_an_earlier_connection_count_no_more() -> None:
    contact = HeadContact(lost_after_s=30.0, now=0.0)
    contact.sent(1, now=50.0)
    contact.begin(sent_at=20.0)
    contact.seen(1)
    assert contact.must_end_processes(now=36.0)


def test_processes_have_ended_before_the_head_counts_the_node_as_lost() -> None:
    contact = HeadContact(lost_after_s=30.0, now=0.0)
    missed_at = next(now for now in range(60) if contact.must_end_processes(now=float(now)))
    assert missed_at + contact.stop_timeout_s < 30.0


def test_an_agent_stays_while_the_lease_shows_that_the_head_lives() -> None:
    contact = HeadContact(lost_after_s=30.0, now=0.0)
    contact.noticed(now=50.0)
    assert contact.must_end_processes(now=100.0)
    assert not contact.must_end_agent(now=110.0)
    assert contact.must_end_agent(now=110.1)
