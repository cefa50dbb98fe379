"""The head keeps who is there, what each node runs, and which orders it has not carried out."""

from typing import Any

import pytest

from trivet.cluster.table import NodeLost
from trivet.launcher.nodes.messages import Beat, EndRun, Hello, HoldPorts, Orders, Refused, RemoteState, ShowStacks
from trivet.launcher.nodes.registry import NodeRegistry
from trivet.wire.status import ProcessReport

FIRST, SECOND = b"first agent", b"second agent"
LOST_AFTER_S = 30.0
UNIX = 1_000_000.0
HOLD, SHOW, END = HoldPorts(names=("inference",)), ShowStacks(process=1, pids=(7,)), EndRun(exit_code=0)


def make_registry() -> NodeRegistry:
    return NodeRegistry({1: 2, 2: 0}, config_digest="abc", version="1.0", lost_after_s=LOST_AFTER_S)


def make_hello(**changes: Any) -> Hello:
    fields = {"index": 1, "name": "host-1", "host": "10.0.0.1", "interface": "eth0", "gpus": ("0", "1"), "num_cpus": 4}
    return Hello(**{**fields, "instance": "a1", "version": "1.0", "config_digest": "abc", "does_see_lock": True, **changes})


def make_beat(number: int, *, num_done: int = 0, time: float = UNIX, **changes: Any) -> Beat:
    return Beat(number=number, time=time, num_done=num_done, **changes)


def tell(
    registry: NodeRegistry, message: Hello | Beat, *, key: bytes = FIRST, now: float = 0.0, unix_time: float = UNIX
) -> Orders | Refused:
    return registry.receive(key, message, now=now, unix_time=unix_time)


def tell_accepted(registry: NodeRegistry, message: Hello | Beat, **how: Any) -> Orders:
    answer = tell(registry, message, **how)
    assert isinstance(answer, Orders)
    return answer


def with_first_agent() -> NodeRegistry:
    registry = make_registry()
    tell_accepted(registry, make_hello())
    return registry


def test_a_node_that_introduces_itself_is_welcomed_and_present() -> None:
    registry = make_registry()
    assert registry.present(now=0.0) == {}
    assert tell(registry, make_hello()) == Orders(beat=0, first=1, orders=[], lost_after_s=LOST_AFTER_S)
    node = registry.present(now=0.0)[1]
    assert (node.index, node.name, node.host, node.interface, node.ports) == (1, "host-1", "10.0.0.1", "eth0", {})
    assert (node.machine.gpus, node.machine.num_cpus) == (("0", "1"), 4)
    assert (registry.key_of(1), registry.key_of(2)) == (FIRST, None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"index": 3}, "the run has no node 3"),
        ({"index": 0}, "the run has no node 0"),
        ({"version": "0.9"}, "it has trivet 0.9, the first node 1.0"),
        ({"config_digest": "def"}, "another configuration"),
        ({"does_see_lock": False}, "mount the shared file system so that locks hold"),
        ({"gpus": ("0",)}, "it shows 1 GPU(s), and deployment.gpus_per_node is 2"),
    ],
)
def test_a_node_that_never_fits_is_refused_for_good(changes: dict[str, Any], reason: str) -> None:
    registry = make_registry()
    answer = tell(registry, make_hello(**changes))
    assert isinstance(answer, Refused)
    assert reason in answer.reason
    assert answer.is_final
    assert answer.is_old_start is ("config_digest" in changes)
    assert registry.present(now=0.0) == {}


def test_an_agent_that_has_not_introduced_itself_is_refused_and_may_ask_again() -> None:
    registry = make_registry()
    answer = tell(registry, make_beat(1))
    assert isinstance(answer, Refused)
    assert not answer.is_final
    assert registry.key_of(1) is None


def test_orders_are_repeated_until_they_are_carried_out_and_then_left_out() -> None:
    registry = with_first_agent()
    assert [registry.order(1, order) for order in (HOLD, SHOW)] == [1, 2]
    answers = [tell_accepted(registry, make_beat(1)), tell_accepted(registry, make_beat(2))]
    assert [(answer.first, answer.orders) for answer in answers] == [(1, [HOLD, SHOW])] * 2
    after_one = tell_accepted(registry, make_beat(3, num_done=1))
    assert (after_one.first, after_one.orders, after_one.beat) == (2, [SHOW], 3)
    after_all = tell_accepted(registry, make_beat(4, num_done=2))
    assert (after_all.first, after_all.orders) == (3, [])
    assert registry.order(1, END) == 3
    assert tell_accepted(registry, make_beat(5, num_done=2)).orders == [END]


def test_every_node_has_orders_of_its_own() -> None:
    registry = with_first_agent()
    tell_accepted(registry, make_hello(index=2, name="host-2"), key=SECOND)
    registry.order(1, HOLD)
    assert registry.order(2, SHOW) == 1
    assert tell_accepted(registry, make_beat(1)).orders == [HOLD]
    assert tell_accepted(registry, make_beat(1), key=SECOND).orders == [SHOW]
    assert sorted(registry.present(now=0.0)) == [1, 2]


def test_a_beat_that_was_overtaken_changes_nothing() -> None:
    registry = with_first_agent()
    registry.order(1, HOLD)
    state = RemoteState(order=1, pid=7, exit_code=3)
    tell_accepted(registry, make_beat(2, num_done=1, ports={"inference": 4000}, processes=[state]))
    answer = tell_accepted(registry, make_beat(1, ports={}, processes=[RemoteState(order=1, pid=7)]))
    assert (answer.beat, answer.first, answer.orders) == (2, 2, [])
    assert registry.state_of(1, FIRST, 1, now=0.0) == state
    assert registry.present(now=0.0)[1].ports == {"inference": 4000}


def test_an_introduction_that_is_repeated_keeps_what_is_known() -> None:
    registry = with_first_agent()
    registry.order(1, HOLD)
    tell_accepted(registry, make_beat(1, num_done=1, ports={"inference": 4000}))
    assert tell_accepted(registry, make_hello()).first == 2
    assert registry.present(now=0.0)[1].ports == {"inference": 4000}


def test_a_silent_node_is_lost_and_its_agent_must_begin_anew() -> None:
    registry = with_first_agent()
    tell_accepted(registry, make_beat(1), now=5.0)
    assert sorted(registry.present(now=5.0 + LOST_AFTER_S)) == [1]
    assert registry.present(now=5.1 + LOST_AFTER_S) == {}
    answer = tell(registry, make_beat(2), now=5.2 + LOST_AFTER_S)
    assert isinstance(answer, Refused)
    assert not answer.is_final
    assert registry.present(now=5.3 + LOST_AFTER_S) == {}
    tell_accepted(registry, make_hello(), key=SECOND, now=40.0)
    assert sorted(registry.present(now=40.0)) == [1]


def test_what_is_asked_of_a_process_shows_that_its_node_is_lost() -> None:
    registry = with_first_agent()
    tell_accepted(registry, make_beat(1, processes=[RemoteState(order=1, pid=7)]))
    assert registry.state_of(1, FIRST, 2, now=0.0) is None
    for node, key, now in ((1, FIRST, LOST_AFTER_S + 0.1), (1, SECOND, 0.0), (2, FIRST, 0.0)):
        with pytest.raises(NodeLost) as caught:
            registry.state_of(node, key, 1, now=now)
        assert caught.value.args == (node,)


def test_a_new_agent_of_the_same_host_takes_the_place_of_the_old_one() -> None:
    registry = with_first_agent()
    registry.order(1, HOLD)
    tell_accepted(registry, make_beat(1, ports={"inference": 4000}, processes=[RemoteState(order=1, pid=7)]))
    answer = tell_accepted(registry, make_hello(instance="a2"), key=SECOND, now=1.0)
    assert (answer.first, answer.orders, registry.key_of(1)) == (1, [], SECOND)
    assert registry.present(now=1.0)[1].ports == {}
    assert registry.state_of(1, SECOND, 1, now=1.0) is None
    assert isinstance(tell(registry, make_beat(2), now=1.0), Refused)
    with pytest.raises(NodeLost):
        registry.state_of(1, FIRST, 1, now=1.0)


def test_another_host_has_to_wait_until_the_old_one_is_lost() -> None:
    registry = with_first_agent()
    answer = tell(registry, make_hello(name="host-9"), key=SECOND, now=LOST_AFTER_S)
    assert answer == Refused(reason="host-1 is node 1 already")
    assert registry.key_of(1) == FIRST
    tell_accepted(registry, make_hello(name="host-9"), key=SECOND, now=LOST_AFTER_S + 0.1)
    assert registry.present(now=LOST_AFTER_S + 0.1)[1].name == "host-9"


def test_an_agent_that_was_replaced_does_not_take_its_place_back() -> None:
    registry = with_first_agent()
    tell_accepted(registry, make_hello(instance="a2"), key=SECOND, now=1.0)
    answer = tell(registry, make_hello(), key=b"first agent again", now=2.0)
    assert isinstance(answer, Refused)
    assert answer.is_final
    assert registry.key_of(1) == SECOND


def test_an_agent_that_connects_anew_replaces_nobody_but_itself() -> None:
    registry = with_first_agent()
    for number in range(3):
        tell_accepted(registry, make_hello(), key=b"connection %d" % number, now=float(number))
    assert registry.key_of(1) == b"connection 2"


def test_a_node_that_never_came_takes_no_orders() -> None:
    with pytest.raises(NodeLost):
        make_registry().order(1, HOLD)


def test_an_order_for_one_agent_does_not_reach_the_next() -> None:
    registry = with_first_agent()
    assert registry.order(1, HOLD, key=FIRST) == 1
    with pytest.raises(NodeLost):
        registry.order(1, HOLD, key=SECOND)


def report_at(time: float) -> list[RemoteState]:
    """Return a process whose newest report has `time`, and whose activity began ten seconds before."""
    report = ProcessReport(role="trainer", pid=7, time=time, since=time - 10)
    return [RemoteState(order=1, pid=7, reports=(report,), stamps={"trainer": (1, 2)})]


@pytest.mark.parametrize("clock_error", [3600.0, -3600.0, 2.5])
def test_reports_have_times_of_the_heads_clock(clock_error: float) -> None:
    registry = with_first_agent()
    told = UNIX + clock_error
    tell_accepted(registry, make_beat(1, time=told, processes=report_at(told - 5)))
    (report,), stamps = registry.reports_of(1, FIRST, 1)
    assert (report.time, report.since, stamps) == (UNIX - 5, UNIX - 15, {"trainer": (1, 2)})


def test_times_of_a_node_stay_as_they_were_when_messages_take_longer() -> None:
    registry = with_first_agent()
    written, seen = UNIX - 3600.0, []
    for number, delay in enumerate((0.1, 0.9, 0.0, 1.5), start=1):
        beat = make_beat(number, time=written + number, processes=report_at(written))
        tell_accepted(registry, beat, unix_time=UNIX + number + delay)
        seen.append(registry.reports_of(1, FIRST, 1)[0][0].time)
    assert seen == [UNIX + 0.1] * 4


def test_a_clock_that_was_set_anew_is_followed() -> None:
    registry = with_first_agent()
    for number, clock_error in enumerate((3600.0, 0.0), start=1):
        told = UNIX + clock_error
        tell_accepted(registry, make_beat(number, time=told, processes=report_at(told)))
        assert registry.reports_of(1, FIRST, 1)[0][0].time == UNIX


def test_times_of_a_clock_that_is_right_stay_as_they_were_told() -> None:
    registry = with_first_agent()
    tell_accepted(registry, make_beat(1, time=UNIX - 0.3, processes=report_at(UNIX - 5)))
    assert registry.reports_of(1, FIRST, 1)[0][0].time == UNIX - 5


@pytest.mark.parametrize(("node", "key", "order"), [(1, FIRST, 2), (2, FIRST, 1), (1, SECOND, 1)])
def test_a_process_that_is_not_known_has_no_reports(node: int, key: bytes, order: int) -> None:
    registry = with_first_agent()
    tell_accepted(registry, make_beat(1, processes=report_at(UNIX)))
    assert registry.reports_of(node, key, order) == ((), {})


def test_a_node_says_why_it_holds_no_ports() -> None:
    registry = with_first_agent()
    tell_accepted(registry, make_hello(index=2, name="host-2"), key=SECOND)
    tell_accepted(registry, make_beat(1, port_error="no port is free"), key=SECOND)
    assert registry.problems(now=0.0) == ["node 2 (host-2): no port is free"]


def test_all_is_done_when_every_node_that_is_there_has_done_it() -> None:
    registry = with_first_agent()
    tell_accepted(registry, make_hello(index=2, name="host-2"), key=SECOND)
    assert registry.have_all_done()
    for node in (1, 2):
        registry.order(node, END)
    tell_accepted(registry, make_beat(1, num_done=1), now=20.0)
    assert not registry.have_all_done()
    assert sorted(registry.present(now=LOST_AFTER_S + 1)) == [1]
    assert registry.have_all_done()


def test_a_refusal_is_a_problem_until_the_node_is_welcomed() -> None:
    registry = make_registry()
    tell(registry, make_hello(gpus=()))
    (problem,) = registry.problems(now=0.0)
    assert problem.startswith("node 1 (host-1) is refused: it shows 0 GPU(s)")
    tell_accepted(registry, make_hello())
    assert registry.problems(now=0.0) == []


def test_the_refusal_of_an_agent_that_has_gone_is_no_problem_of_the_node_that_came_instead() -> None:
    registry = make_registry()
    tell(registry, make_hello(version="0.9"))
    tell_accepted(registry, make_hello(name="host-4", instance="b1"), key=SECOND)
    assert registry.problems(now=0.0) == []
    tell(registry, make_hello(), now=1.0)  # the place is taken
    assert registry.problems(now=LOST_AFTER_S) == ["node 1 (host-1) is refused: host-4 is node 1 already"]
    tell_accepted(registry, make_beat(1), key=SECOND, now=LOST_AFTER_S)
    assert registry.problems(now=LOST_AFTER_S + 2) == []


def test_a_node_that_a_signal_asks_to_end_is_leaving_until_it_is_lost() -> None:
    registry = with_first_agent()
    assert registry.leaving() == frozenset()
    tell_accepted(registry, make_beat(1, is_leaving=True))
    assert registry.leaving() == {1}
    registry.present(now=LOST_AFTER_S + 1)
    assert registry.leaving() == frozenset()
