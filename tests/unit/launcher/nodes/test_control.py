"""Messages between the head and the agents cross real sockets, for those alone who have the run's secret."""

import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import msgspec
import pytest

from support.processes import assert_port_free, find_free_port, wait_until
from trivet.launcher.nodes.control import ControlClient, ControlServer
from trivet.launcher.nodes.messages import Beat, Hello, HoldPorts, Orders, Refused, StartProcess
from trivet.launcher.nodes.registry import NodeRegistry
from trivet.process.sockets import ReservedPorts
from trivet.secret import RunSecret

HOST = "127.0.0.1"
SECRET, ANOTHER_SECRET = RunSecret(b"s" * 32), RunSecret(b"t" * 32)
NODES = {1: 0, 2: 0}


def make_hello(index: int = 1) -> Hello:
    return Hello(
        index=index,
        name=f"host-{index}",
        host=HOST,
        interface="lo",
        gpus=(),
        num_cpus=2,
        instance="a1",
        version="1.0",
        config_digest="abc",
        does_see_lock=True,
    )


@contextmanager
def serve(registry: NodeRegistry, port: int) -> Iterator[None]:
    with ControlServer(registry, host=HOST, port=port, secret=SECRET):
        yield


@pytest.fixture
def port() -> Iterator[int]:
    """A port that this process holds, as the launcher holds those of a run."""
    with ReservedPorts() as ports:
        yield ports.reserve(HOST, preferred=find_free_port())


@pytest.fixture
def registry() -> NodeRegistry:
    return NodeRegistry(NODES, config_digest="abc", version="1.0", lost_after_s=30.0)


@pytest.fixture
def head(registry: NodeRegistry, port: int) -> Iterator[int]:
    """The port at which a server with `registry` listens."""
    with serve(registry, port):
        yield port


def connect(port: int, secret: RunSecret = SECRET) -> "closing[ControlClient]":
    return closing(ControlClient(host=HOST, port=port, secret=secret))


def ask(client: ControlClient, message: Hello | Beat, *, timeout_s: float = 10.0) -> Orders | Refused:
    """Send `message` again and again, as agents do, until there is an answer; return it."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        client.send(message)
        if answers := client.receive(timeout_s=0.1):
            return answers[0]
    raise AssertionError(f"no answer within {timeout_s:g} s")


def test_a_message_is_answered_by_the_registry(registry: NodeRegistry, head: int) -> None:
    with connect(head) as client:
        assert ask(client, make_hello()) == Orders(beat=0, first=1, orders=[], lost_after_s=30.0)
        start = StartProcess(
            name="trainer-1",
            unit="training",
            argv=("python", "-c", "pass"),
            log="/runs/trainer-1.stdout",
            env={"A": "1"},
            env_defaults={},
            does_finish=True,
            reports=(("trainer rank 1 of 2", "/runs/report"),),
            are_children_watched=True,
        )
        hold = HoldPorts(names=("inference",), preferred={"inference": 8000})
        registry.order(1, hold)
        registry.order(1, start)
        answer = ask(client, Beat(number=1, time=0.0, num_done=0))
    assert answer == Orders(beat=1, first=1, orders=[hold, start], lost_after_s=30.0)


def test_a_refusal_reaches_the_node(head: int) -> None:
    with connect(head) as client:
        assert ask(client, make_hello(index=7)) == Refused(reason="the run has no node 7", is_final=True)


def test_every_agent_gets_its_own_answers(registry: NodeRegistry, head: int) -> None:
    with connect(head) as first, connect(head) as second:
        for index, client in ((1, first), (2, second)):
            ask(client, make_hello(index))
            registry.order(index, HoldPorts(names=(f"of node {index}",)))
        for index, client in ((2, second), (1, first)):
            answer = ask(client, Beat(number=1, time=0.0, num_done=0))
            assert isinstance(answer, Orders)
            assert answer.orders == [HoldPorts(names=(f"of node {index}",))]
        assert registry.key_of(1) != registry.key_of(2)


def test_a_client_with_another_secret_gets_no_answer_and_is_not_heard(registry: NodeRegistry, head: int) -> None:
    with connect(head) as client, connect(head, ANOTHER_SECRET) as stranger:
        ask(client, make_hello(1))
        for _ in range(5):
            stranger.send(make_hello(2))
            assert stranger.receive(timeout_s=0.1) == []
        assert registry.key_of(2) is None
        assert isinstance(ask(client, Beat(number=1, time=0.0, num_done=0)), Orders)


def test_an_agent_does_not_trust_a_head_with_another_secret(registry: NodeRegistry, port: int) -> None:
    """A stranger that took the head's port gets nothing to start on the nodes."""
    with ControlServer(registry, host=HOST, port=port, secret=ANOTHER_SECRET), connect(port) as client:
        for _ in range(5):
            client.send(make_hello())
            assert client.receive(timeout_s=0.1) == []
    assert registry.key_of(1) is None


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(msgspec.Raw(b""), id="nothing"),
        pytest.param(msgspec.Raw(b"\xc1\xff\x00"), id="bytes that are no message"),
        pytest.param(msgspec.Raw(b"\x82\xa4type\xa4Beat\xa1x" + b"\x91" * 100_000), id="deep nesting"),
        pytest.param({"type": "Beat", "number": 1}, id="half a message"),
        pytest.param({"type": "Goodbye"}, id="a message of another version"),
        pytest.param({"type": "Beat", "number": "many", "time": 0.0, "num_done": 0}, id="a word for a number"),
        pytest.param({"type": "Hello", "name": msgspec.Raw(b"\xa2\xff\xfe")}, id="text that is no UTF-8"),
    ],
)
def test_what_cannot_be_read_is_refused_and_the_next_message_answered(
    registry: NodeRegistry, head: int, garbage: object
) -> None:
    with connect(head) as client:
        ask(client, make_hello())
        refused = ask(client, garbage)
        assert isinstance(refused, Refused)
        assert refused.is_final
        assert ask(client, Beat(number=1, time=0.0, num_done=0)) == Orders(beat=1, first=1, orders=[], lost_after_s=30.0)
    assert list(registry.present(now=time.monotonic())) == [1]


def test_messages_are_heard_at_the_time_of_the_heads_clocks(registry: NodeRegistry, port: int) -> None:
    with ControlServer(registry, host=HOST, port=port, secret=SECRET, clock=lambda: 500.0), connect(port) as client:
        ask(client, make_hello())
    assert list(registry.present(now=530.0)) == [1]
    assert list(registry.present(now=530.1)) == []


def test_agents_hear_nothing_while_the_head_may_not_answer_and_still_count_as_there(registry: NodeRegistry, port: int) -> None:
    may_answer = True
    with ControlServer(registry, host=HOST, port=port, secret=SECRET, may_answer=lambda: may_answer), connect(port) as client:
        ask(client, make_hello())
        may_answer = False
        client.receive(timeout_s=0.3)  # answers to what was sent before
        client.send(Beat(number=7, time=0.0, num_done=0, is_leaving=True))
        wait_until(lambda: registry.leaving() == {1}, timeout_s=20, waiting_for="the beat")
        assert client.receive(timeout_s=0.3) == []
        may_answer = True
        assert ask(client, Beat(number=8, time=0.0, num_done=0)) == Orders(beat=8, first=1, orders=[], lost_after_s=30.0)


def test_an_agent_finds_a_head_that_listens_again(registry: NodeRegistry, port: int) -> None:
    with connect(port) as client:
        with serve(registry, port):
            ask(client, make_hello())
        assert client.receive(timeout_s=0.0) == []
        with serve(registry, port):
            assert isinstance(ask(client, Beat(number=1, time=0.0, num_done=0)), Orders)


def test_nobody_listens_after_the_end(registry: NodeRegistry) -> None:
    port = find_free_port()
    with serve(registry, port), connect(port) as client:
        ask(client, make_hello())
    assert_port_free(port)


def test_a_port_on_which_another_program_listens_is_refused(registry: NodeRegistry) -> None:
    port = find_free_port()
    with socket.create_server((HOST, port)), pytest.raises(OSError, match="Address already in use"):
        ControlServer(registry, host=HOST, port=port, secret=SECRET)


def test_a_defect_in_the_thread_is_raised_where_nodes_are_asked_for(
    registry: NodeRegistry, head: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def receive(*_: object, **__: object) -> Orders:
        raise RuntimeError("a defect")

    monkeypatch.setattr(registry, "receive", receive)
    with connect(head) as client:

        def is_raised() -> bool:
            client.send(make_hello())
            try:
                registry.check()
            except RuntimeError as exc:
                return str(exc) == "a defect"
            return False

        wait_until(is_raised, timeout_s=20, waiting_for="the defect")
