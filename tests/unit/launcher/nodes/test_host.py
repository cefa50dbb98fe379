"""The nodes of a run are one host to the supervisor: a process on another node is known by the beats of its agent."""

import signal
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from trivet.launcher.nodes.host import NodeHost
from trivet.launcher.nodes.messages import (
    Beat,
    EndOrphans,
    EndRun,
    Hello,
    HoldPorts,
    Order,
    Orders,
    RemoteState,
    ShowStacks,
    SignalProcess,
    StartProcess,
)
from trivet.launcher.nodes.registry import NodeRegistry

from support.fake_roles import FakeChild, FakeClock, FakeHost, make_spec
from trivet.config.layout import RunLayout
from trivet.exits import NODE_LOST
from trivet.launcher.plan import ProcessSpec
from trivet.wire.status import ProcessReport

LOST_AFTER_S = 30.0
WANTED = {1: ("inference",), 2: ()}


@dataclass(kw_only=True)
class FakeAgent:
    """Speaks for the agent of a node: it carries out every order, and its processes are only what it says of them."""

    registry: NodeRegistry
    clock: FakeClock
    index: int = 1
    key: bytes = b"first agent"
    ports: dict[str, int] = field(default_factory=dict)
    first_port: int = 4000
    orders: list[Order] = field(default_factory=list)
    states: dict[int, RemoteState] = field(default_factory=dict)
    num_beats: int = 0

    def join(self) -> None:
        hello = Hello(
            index=self.index,
            name=f"host-{self.index}",
            host=f"10.0.0.{self.index}",
            interface="eth0",
            gpus=(),
            num_cpus=2,
            instance="a1",
            version="1.0",
            config_digest="abc",
            has_working_dir=True,
            does_see_lock=True,
        )
        assert isinstance(self._tell(hello), Orders)

    def beat(self) -> None:
        """Say how the node stands, and carry out what the answer brings; the next beat says what came of it."""
        self.num_beats += 1
        answer = self._tell(
            Beat(
                number=self.num_beats,
                time=self.clock.unix_time(),
                num_done=len(self.orders),
                ports=dict(self.ports),
                processes=list(self.states.values()),
            )
        )
        assert isinstance(answer, Orders)
        for order in answer.orders:
            self._carry_out(order)

    def beat_twice(self) -> None:
        """Carry out what is ordered and tell it."""
        self.beat()
        self.beat()

    def set_state(self, order: int, **changes: object) -> None:
        self.states[order] = RemoteState(**{"order": order, "pid": 700 + order, **changes})

    def _carry_out(self, order: Order) -> None:
        self.orders.append(order)
        if isinstance(order, HoldPorts):
            for offset, name in enumerate(order.names):
                self.ports[name] = order.preferred.get(name, self.first_port + offset)
        if isinstance(order, StartProcess):
            self.set_state(len(self.orders))

    def _tell(self, message: Hello | Beat) -> object:
        return self.registry.receive(self.key, message, now=self.clock.now(), unix_time=self.clock.unix_time())


@dataclass
class Nodes:
    """A host of three nodes, the first of which is the head's."""

    layout: RunLayout
    clock: FakeClock = field(default_factory=FakeClock)

    def __post_init__(self) -> None:
        self.registry = NodeRegistry(dict.fromkeys(WANTED, 0), config_digest="abc", version="1.0", lost_after_s=LOST_AFTER_S)
        self.local = FakeHost(clock=self.clock)
        self.host = NodeHost(self.local, self.registry, wanted=WANTED, clock=self.clock.now, sleep=self.clock.sleep)
        self.agents = {index: FakeAgent(registry=self.registry, clock=self.clock, index=index) for index in WANTED}

    def bring_up(self) -> None:
        """Have both other nodes join and hold their ports."""
        for agent in self.agents.values():
            agent.key = b"agent of %d" % agent.index
            agent.join()
        self.host.lost_nodes()
        for agent in self.agents.values():
            agent.beat_twice()
        assert self.host.lost_nodes() == frozenset()

    def spec(self, name: str = "inference", *, node: int = 1) -> ProcessSpec:
        return replace(make_spec(self.layout, name), node=node)

    def replace_agent(self, index: int, *, first_port: int = 5000) -> FakeAgent:
        """Have a new agent of the same host join, which holds nothing."""
        agent = FakeAgent(registry=self.registry, clock=self.clock, index=index, key=b"next", first_port=first_port)
        self.agents[index] = agent
        agent.join()
        return agent


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return Nodes(RunLayout(tmp_path))


def test_a_node_is_lost_until_it_holds_its_ports(nodes: Nodes) -> None:
    agent = nodes.agents[1]
    assert nodes.host.lost_nodes() == {1, 2}
    agent.join()
    assert nodes.host.lost_nodes() == {1, 2}
    agent.beat()
    assert agent.orders == [HoldPorts(names=("inference",))]
    assert nodes.host.lost_nodes() == {1, 2}
    agent.beat()
    assert nodes.host.lost_nodes() == {2}
    node = nodes.host.nodes()[1]
    assert (node.host, node.ports) == ("10.0.0.1", {"inference": 4000})


def test_a_node_on_which_nothing_listens_needs_no_ports(nodes: Nodes) -> None:
    nodes.agents[2].join()
    nodes.host.lost_nodes()
    assert nodes.host.lost_nodes() == {1}


def test_a_node_is_asked_for_its_ports_once(nodes: Nodes) -> None:
    nodes.bring_up()
    for _ in range(3):
        nodes.host.nodes()
        nodes.agents[1].beat()
    assert nodes.agents[1].orders == [HoldPorts(names=("inference",))]


def test_a_silent_node_is_lost(nodes: Nodes) -> None:
    nodes.bring_up()
    nodes.clock.sleep(LOST_AFTER_S)
    assert nodes.host.lost_nodes() == frozenset()
    nodes.agents[2].beat()
    nodes.clock.sleep(1)
    assert nodes.host.lost_nodes() == {1}


def test_a_node_that_came_back_is_asked_for_the_ports_that_it_had(nodes: Nodes) -> None:
    nodes.bring_up()
    agent = nodes.replace_agent(1)
    assert nodes.host.lost_nodes() == {1}
    agent.beat()
    assert agent.orders == [HoldPorts(names=("inference",), preferred={"inference": 4000})]
    agent.beat()
    assert nodes.host.lost_nodes() == frozenset()
    assert nodes.host.nodes()[1].ports == {"inference": 4000}


def test_a_process_of_another_node_is_started_by_its_agent(nodes: Nodes) -> None:
    nodes.bring_up()
    spec = nodes.spec()
    process = nodes.host.start(spec)
    assert (process.spec, process.pid, process.exit_code) == (spec, 0, None)
    nodes.agents[1].beat_twice()
    assert nodes.agents[1].orders[1:] == [StartProcess.of(spec)]
    assert (process.pid, process.exit_code) == (702, None)
    assert nodes.local.started == []


def test_a_process_of_the_head_is_started_there(nodes: Nodes) -> None:
    nodes.bring_up()
    process = nodes.host.start(nodes.spec("trainer", node=0))
    assert nodes.local.started == [process]
    nodes.agents[1].beat()
    assert len(nodes.agents[1].orders) == 1


def test_the_agent_starts_what_was_planned(nodes: Nodes) -> None:
    spec = nodes.spec()
    assert StartProcess.of(spec).spec(1) == spec


def test_output_is_read_from_where_the_process_begins(nodes: Nodes) -> None:
    nodes.bring_up()
    spec = nodes.spec()
    assert nodes.host.start(spec).log_offset == 0
    spec.log.parent.mkdir(parents=True)
    spec.log.write_text("of the attempt before\n")
    assert nodes.host.start(spec).log_offset == 22


@pytest.mark.parametrize("code", [0, 3, -9, 127])
def test_an_exit_code_comes_with_a_beat_and_stays(nodes: Nodes, code: int) -> None:
    nodes.bring_up()
    process = nodes.host.start(nodes.spec())
    nodes.agents[1].beat()
    nodes.agents[1].set_state(2, exit_code=code)
    assert process.exit_code is None
    nodes.agents[1].beat()
    assert process.exit_code == code
    nodes.clock.sleep(LOST_AFTER_S + 1)
    assert (process.pid, process.exit_code) == (0, code)


def test_a_process_is_lost_with_its_silent_node(nodes: Nodes) -> None:
    nodes.bring_up()
    process = nodes.host.start(nodes.spec())
    nodes.agents[1].beat_twice()
    nodes.clock.sleep(LOST_AFTER_S)
    assert process.exit_code is None
    nodes.clock.sleep(0.1)
    assert (process.exit_code, process.pid) == (NODE_LOST, 0)
    nodes.replace_agent(1)
    assert process.exit_code == NODE_LOST


def test_a_process_is_lost_when_its_node_has_a_new_agent(nodes: Nodes) -> None:
    nodes.bring_up()
    process = nodes.host.start(nodes.spec())
    nodes.agents[1].beat_twice()
    nodes.replace_agent(1)
    assert process.exit_code == NODE_LOST


def test_a_process_for_a_node_that_never_came_is_lost_at_once(nodes: Nodes) -> None:
    process = nodes.host.start(nodes.spec())
    assert (process.exit_code, process.pid) == (NODE_LOST, 0)


def test_a_process_for_a_node_that_is_lost_is_lost_at_once(nodes: Nodes) -> None:
    nodes.bring_up()
    nodes.clock.sleep(LOST_AFTER_S + 1)
    assert nodes.host.start(nodes.spec()).exit_code == NODE_LOST


def test_signals_become_orders_for_the_process_that_they_are_for(nodes: Nodes) -> None:
    nodes.bring_up()
    agent = nodes.agents[1]
    process = nodes.host.start(nodes.spec())
    process.signal_group(signal.SIGTERM)
    process.signal_leader(signal.SIGUSR1)
    agent.beat_twice()
    assert agent.orders[2:] == [
        SignalProcess(process=2, signal=signal.SIGTERM, does_reach_group=True),
        SignalProcess(process=2, signal=signal.SIGUSR1, does_reach_group=False),
    ]


def test_a_process_that_has_ended_gets_no_signals(nodes: Nodes) -> None:
    nodes.bring_up()
    process = nodes.host.start(nodes.spec())
    nodes.agents[1].beat()
    nodes.agents[1].set_state(2, exit_code=0)
    nodes.agents[1].beat()
    process.signal_group(signal.SIGKILL)
    nodes.host.show_stacks(process, [702])
    nodes.agents[1].beat()
    assert len(nodes.agents[1].orders) == 2


def test_a_lost_process_gets_no_signals_though_its_node_came_back(nodes: Nodes) -> None:
    nodes.bring_up()
    process = nodes.host.start(nodes.spec())
    agent = nodes.replace_agent(1)
    process.signal_group(signal.SIGKILL)
    nodes.host.show_stacks(process, [702])
    agent.beat()
    assert agent.orders == []


def test_processes_of_all_nodes_are_ended_together(nodes: Nodes) -> None:
    nodes.bring_up()
    own, remote = nodes.host.start(nodes.spec("trainer", node=0)), nodes.host.start(nodes.spec())
    assert nodes.host.stop([own, remote], timeout_s=1.0, is_hurried=lambda: True) == [remote]
    assert own.exit_code == -signal.SIGTERM
    assert nodes.local.was_hurried
    nodes.agents[1].beat()
    signals = [order.signal for order in nodes.agents[1].orders if isinstance(order, SignalProcess)]
    assert signals == [signal.SIGTERM, signal.SIGKILL]


def test_orphans_are_ended_on_every_node_beside_what_goes_on_there(nodes: Nodes) -> None:
    nodes.bring_up()
    own = nodes.host.start(nodes.spec("orchestrator", node=0))
    kept = nodes.host.start(nodes.spec("inference"))
    nodes.host.start(nodes.spec("trainer"))
    elsewhere = nodes.host.start(nodes.spec("trainer", node=2))
    nodes.host.end_orphans(spared=[own, kept, elsewhere])
    assert nodes.local.spared == [[own]]
    for agent in nodes.agents.values():
        agent.beat()
    assert nodes.agents[1].orders[-1] == EndOrphans(spared=(2,))
    assert nodes.agents[2].orders[-1] == EndOrphans(spared=(2,))
    assert [type(order) for order in nodes.agents[1].orders] == [HoldPorts, StartProcess, StartProcess, EndOrphans]


def test_stacks_are_shown_where_the_process_is(nodes: Nodes) -> None:
    nodes.bring_up()
    own, remote = nodes.host.start(nodes.spec("trainer", node=0)), nodes.host.start(nodes.spec())
    nodes.host.show_stacks(own, [11])
    nodes.host.show_stacks(remote, iter([12, 13]))
    nodes.agents[1].beat()
    assert nodes.local.shown == [11]
    assert nodes.agents[1].orders[-1] == ShowStacks(process=2, pids=(12, 13))


def test_stopped_processes_are_found_on_every_node_in_the_order_asked(nodes: Nodes) -> None:
    nodes.bring_up()
    remote, own, unknown = (
        nodes.host.start(nodes.spec()),
        nodes.host.start(nodes.spec("trainer", node=0)),
        nodes.host.start(nodes.spec("trainer")),
    )
    assert isinstance(own, FakeChild)
    nodes.local.stopped.add(own.pid)
    nodes.agents[1].beat()
    nodes.agents[1].set_state(2, stopped=(702, 705))
    nodes.agents[1].beat()
    assert nodes.host.find_stopped([remote, own, unknown]) == [(702, 705), (own.pid,), ()]


def test_reports_come_with_the_beats_and_have_the_heads_time(nodes: Nodes) -> None:
    nodes.bring_up()
    process = nodes.host.start(nodes.spec())
    assert nodes.host.read_reports(process).readable == ()
    nodes.agents[1].beat()
    report = ProcessReport(role="inference", pid=702, time=nodes.clock.unix_time(), since=0.0)
    nodes.agents[1].set_state(2, reports=(report,), stamps={"inference": (1, 2)})
    nodes.agents[1].beat()
    found = nodes.host.read_reports(process)
    assert (found.readable, found.stamps) == ((report,), {"inference": (1, 2)})


def test_the_end_of_the_run_waits_until_every_agent_has_heard_it(nodes: Nodes) -> None:
    nodes.bring_up()
    before = nodes.clock.now()
    for index, delay in ((1, 1.0), (2, 3.0)):
        nodes.clock.planned.append((before + delay, nodes.agents[index].beat_twice))
    nodes.host.end_run(5)
    assert [agent.orders[-1] for agent in nodes.agents.values()] == [EndRun(exit_code=5)] * 2
    assert 3.0 <= nodes.clock.now() - before < 3.5


def test_the_end_of_the_run_does_not_wait_for_long_for_an_agent_that_hears_nothing(nodes: Nodes) -> None:
    nodes.bring_up()
    before = nodes.clock.now()
    nodes.clock.planned.append((before + 1.0, nodes.agents[1].beat_twice))
    nodes.host.end_run(0)
    assert 10.0 <= nodes.clock.now() - before < 10.5


def test_the_end_of_the_run_does_not_wait_for_a_lost_node(nodes: Nodes) -> None:
    nodes.bring_up()
    process = nodes.host.start(nodes.spec(node=2))
    nodes.clock.sleep(LOST_AFTER_S - 1)
    nodes.agents[1].beat()
    nodes.clock.sleep(2)
    assert process.exit_code == NODE_LOST
    nodes.clock.planned.append((nodes.clock.now() + 1.0, nodes.agents[1].beat_twice))
    before = nodes.clock.now()
    nodes.host.end_run(0)
    assert nodes.clock.now() - before < 1.5
