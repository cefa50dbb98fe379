"""The agent of a node carries out orders with real processes, and decides from the head's answers whether it is missed."""

import os
import signal
import socket
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil
import pytest
from trivet.launcher.nodes.agent import NodeAgent
from trivet.launcher.nodes.messages import (
    Beat,
    EndOrphans,
    EndRun,
    HoldPorts,
    Order,
    Orders,
    RemoteState,
    ShowStacks,
    SignalProcess,
    StartProcess,
)

from support.fake_roles import make_log
from support.processes import assert_port_free, find_free_port, is_alive, kill_all, wait_until
from trivet.launcher.plan import ProcessSpec
from trivet.launcher.processes import Child, HostedProcess, LocalHost, RoleReports
from trivet.launcher.run_directory import Scratch
from trivet.process.sockets import ReservedPorts, is_reserved
from trivet.wire.status import ProcessReport

HOST = "127.0.0.1"
UNIX = 1_000_000.0
END_TIMEOUT_S = 20.0
WAIT = "import time; print('up', flush=True); time.sleep(60)"
WAIT_WITH_CHILD = (
    "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
    "print(child.pid, flush=True); child.wait()"
)


@dataclass
class LoneHost:
    """Starts real processes. It only records the calls that would reach every process that other tests started here."""

    local: LocalHost
    started: list[Child] = field(default_factory=list)
    spared: list[Collection[Child]] = field(default_factory=list)
    shown: list[tuple[Child, tuple[int, ...]]] = field(default_factory=list)

    def start(self, spec: ProcessSpec) -> Child:
        self.started.append(self.local.start(spec))
        return self.started[-1]

    def stop(self, processes: Sequence[Child], *, timeout_s: float) -> Sequence[HostedProcess]:
        return self.local.stop(processes, timeout_s=timeout_s)

    def end_orphans(self, *, spared: Collection[Child] = ()) -> None:
        self.spared.append(spared)

    def show_stacks(self, process: Child, pids: Iterable[int]) -> None:
        self.shown.append((process, tuple(pids)))

    def find_stopped(self, processes: Sequence[Child]) -> list[tuple[int, ...]]:
        return self.local.find_stopped(processes)

    def read_reports(self, process: Child) -> RoleReports:
        return self.local.read_reports(process)


class Node:
    """The agent of node 1 with what it needs, and a head that gives it one order after another."""

    def __init__(self, directory: Path, held: ExitStack) -> None:
        self.directory = directory
        self.host = LoneHost(LocalHost(python=sys.executable, environ=os.environ))
        self.scratch = held.enter_context(Scratch(directory / ".scratch.1"))
        self.ports = held.enter_context(ReservedPorts())
        log, self.written = make_log(directory)
        self.agent = NodeAgent(
            1, host=self.host, bind=HOST, ports=self.ports, scratch=self.scratch, open_log=lambda: log, unix_time=lambda: UNIX
        )
        self.num_orders = 0

    def order(self, order: Order) -> int:
        """Have the agent carry out `order`; return the order's number."""
        self.num_orders += 1
        self.agent.carry_out(orders_from(self.num_orders, order))
        return self.num_orders

    def start_order(self, program: str, *, name: str = "trainer-1", reports: tuple[tuple[str, str], ...] = ()) -> StartProcess:
        return StartProcess(
            name=name,
            unit="training",
            argv=(sys.executable, "-c", program),
            log=str(self.log_file(name)),
            env={"PLACE": "node 1"},
            env_defaults={},
            does_finish=True,
            reports=reports,
            are_children_watched=False,
        )

    def start(self, program: str, *, name: str = "trainer-1") -> int:
        return self.order(self.start_order(program, name=name))

    def log_file(self, name: str = "trainer-1") -> Path:
        return self.directory / "logs" / f"{name}.stdout"

    def state(self, order: int) -> RemoteState:
        return next(state for state in self.agent.beat().processes if state.order == order)

    def await_output(self, name: str = "trainer-1") -> str:
        wait_until(
            lambda: self.log_file(name).exists() and self.log_file(name).read_text().endswith("\n"),
            timeout_s=END_TIMEOUT_S,
            waiting_for=f"a line of {name}",
        )
        return self.log_file(name).read_text()

    def await_exit_code(self, order: int) -> int | None:
        wait_until(lambda: self.state(order).exit_code is not None, timeout_s=END_TIMEOUT_S, waiting_for="its end")
        return self.state(order).exit_code

    def close(self) -> None:
        for child in self.host.started:
            with suppress(psutil.NoSuchProcess):
                kill_all(psutil.Process(child.pid).children(recursive=True))
        self.host.local.stop(self.host.started, timeout_s=0.0)
        self.agent.close()


def orders_from(first: int, *orders: Order) -> Orders:
    return Orders(beat=0, first=first, orders=list(orders), lost_after_s=30.0)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with ExitStack() as held:
        node = Node(tmp_path, held)
        held.callback(node.close)
        yield node


def test_an_agent_without_orders_has_nothing_to_tell(node: Node) -> None:
    assert node.agent.beat() == Beat(number=1, time=UNIX, num_done=0)
    assert node.agent.beat().number == 2
    assert (node.agent.exits, node.agent.exit_code) == ((), None)


def test_a_process_is_started_with_its_environment_and_its_log(node: Node) -> None:
    order = node.start("import os; print(os.environ['PLACE'], os.environ['TMPDIR'], flush=True); raise SystemExit(3)")
    assert node.agent.beat().num_done == order == 1
    assert node.state(order).pid == node.host.started[0].pid
    assert node.await_exit_code(order) == 3
    assert node.log_file().read_text() == f"node 1 {node.scratch.directory}\n"
    assert node.agent.exits == (3,)
    assert f"started trainer-1 pid={node.host.started[0].pid} log={node.log_file()}" in node.written.getvalue()


def test_a_process_that_runs_has_no_exit_code(node: Node) -> None:
    order = node.start(WAIT)
    node.await_output()
    assert (node.state(order).exit_code, node.agent.exits) == (None, (None,))


@pytest.mark.parametrize(("does_reach_group", "number"), [(True, signal.SIGKILL), (False, signal.SIGTERM)])
def test_a_signal_reaches_a_process_or_its_whole_group(node: Node, does_reach_group: bool, number: signal.Signals) -> None:
    order = node.start(WAIT_WITH_CHILD)
    child = psutil.Process(int(node.await_output()))
    try:
        node.order(SignalProcess(process=order, signal=number, does_reach_group=does_reach_group))
        assert node.await_exit_code(order) == -number
        if does_reach_group:
            wait_until(lambda: not is_alive(child), timeout_s=END_TIMEOUT_S, waiting_for="the end of the group")
        else:
            assert is_alive(child)
    finally:
        kill_all([child])


def test_a_signal_for_an_unknown_process_is_ignored(node: Node) -> None:
    node.start(WAIT)
    node.order(SignalProcess(process=7, signal=signal.SIGKILL, does_reach_group=True))
    assert node.agent.beat().num_done == 2
    assert node.agent.exits == (None,)


def test_a_process_that_cannot_be_started_has_an_exit_code_at_once(node: Node) -> None:
    node.log_file().parent.write_text("a file where the directory of logs should be")
    order = node.start("pass")
    assert node.state(order) == RemoteState(order=1, pid=0, exit_code=127)
    assert node.agent.exits == (127,)
    assert "trainer-1 cannot be started: " in node.written.getvalue()
    node.order(SignalProcess(process=order, signal=signal.SIGTERM, does_reach_group=True))
    node.order(ShowStacks(process=order, pids=(7,)))
    node.order(EndOrphans(spared=(order,)))
    assert (node.agent.beat().num_done, node.host.shown, node.host.spared) == (4, [], [[]])


def test_orders_are_carried_out_once_and_in_turn(node: Node) -> None:
    first, second = node.start_order("pass"), node.start_order("pass", name="trainer-2")
    for orders in (
        orders_from(1, first),
        orders_from(1, first, second),
        orders_from(1, first, second),
        orders_from(2, second),
        orders_from(3),
    ):
        node.agent.carry_out(orders)
    assert [child.spec.name for child in node.host.started] == ["trainer-1", "trainer-2"]
    assert node.agent.beat().num_done == 2


def test_orders_wait_for_those_before_them(node: Node) -> None:
    node.agent.carry_out(orders_from(2, node.start_order("pass")))
    assert (node.agent.beat().num_done, node.host.started) == (0, [])


def test_a_second_process_of_one_name_takes_the_place_of_the_first(node: Node) -> None:
    first = node.start("raise SystemExit(1)")
    other = node.start("raise SystemExit(2)", name="inference")
    assert (node.await_exit_code(first), node.await_exit_code(other)) == (1, 2)
    second = node.start("raise SystemExit(3)")
    assert node.await_exit_code(second) == 3
    assert {state.order: state.exit_code for state in node.agent.beat().processes} == {other: 2, second: 3}


def test_a_process_runs_on_this_node_in_the_eyes_of_its_host(node: Node) -> None:
    order = node.start_order("pass", reports=(("trainer rank 1 of 2", str(node.directory / "report")),))
    node.order(order)
    spec = node.host.started[0].spec
    assert (spec.node, spec.unit, spec.does_finish) == (1, "training", True)
    assert [(report.process, report.path) for report in spec.reports] == [("trainer rank 1 of 2", node.directory / "report")]


def test_reports_are_told_with_the_agents_times(node: Node) -> None:
    path = node.directory / "report"
    order = node.order(node.start_order(WAIT, reports=(("trainer rank 1 of 2", str(path)), ("silent", str(path) + "2"))))
    report = ProcessReport(role="trainer", rank=1, pid=7, time=5.0, since=4.0)
    path.write_bytes(msgspec.json.encode(report))
    wait_until(lambda: node.state(order).reports, timeout_s=END_TIMEOUT_S, waiting_for="the report")
    state = node.state(order)
    stat = path.stat()
    assert state.reports == (report,)
    assert state.stamps == {"trainer rank 1 of 2": (stat.st_ino, stat.st_mtime_ns), "silent": None}


def test_a_beat_survives_the_way_to_the_head(node: Node) -> None:
    path = node.directory / "report"
    node.order(node.start_order("pass", reports=(("trainer", str(path)),)))
    path.write_bytes(msgspec.json.encode(ProcessReport(role="trainer", pid=7, time=5.0, since=4.0)))
    wait_until(lambda: node.state(1).reports, timeout_s=END_TIMEOUT_S, waiting_for="the report")
    node.order(HoldPorts(names=("inference",)))
    beat = node.agent.beat()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(beat), type=Beat) == beat


def test_a_stopped_process_is_told(node: Node) -> None:
    running, stopped = node.start(WAIT), node.start(WAIT, name="inference")
    node.await_output("inference")
    node.order(SignalProcess(process=stopped, signal=signal.SIGSTOP, does_reach_group=True))
    wait_until(lambda: node.state(stopped).stopped, timeout_s=END_TIMEOUT_S, waiting_for="the stop")
    assert node.state(stopped).stopped == (node.host.started[1].pid,)
    assert node.state(running).stopped == ()


def test_orphans_are_ended_beside_the_processes_that_go_on(node: Node) -> None:
    kept = node.start(WAIT)
    node.start("pass", name="inference")
    node.order(EndOrphans(spared=(kept, 99)))
    assert node.host.spared == [[node.host.started[0]]]


def test_stacks_are_asked_of_the_process_that_is_meant(node: Node) -> None:
    order = node.start(WAIT)
    node.order(ShowStacks(process=order, pids=(7, 8)))
    node.order(ShowStacks(process=99, pids=(9,)))
    assert node.host.shown == [(node.host.started[0], (7, 8))]


def test_ports_are_held_at_the_nodes_address(node: Node) -> None:
    wanted = find_free_port()
    node.order(HoldPorts(names=("inference", "transport"), preferred={"inference": wanted}))
    ports = node.agent.beat().ports
    assert ports["inference"] == wanted
    assert set(ports) == {"inference", "transport"}
    assert all(is_reserved(HOST, port) for port in ports.values())
    node.order(HoldPorts(names=("inference", "rendezvous"), preferred={"inference": find_free_port()}))
    later = node.agent.beat().ports
    assert {name: later[name] for name in ports} == ports
    assert len(set(later.values())) == 3
    node.ports.close()
    assert_port_free(wanted)


def test_a_port_that_another_program_has_is_replaced(node: Node) -> None:
    taken = find_free_port()
    with socket.create_server((HOST, taken)):
        node.order(HoldPorts(names=("inference",), preferred={"inference": taken}))
        beat = node.agent.beat()
    assert beat.ports["inference"] != taken
    assert beat.port_error == ""


def test_a_node_says_why_it_holds_no_ports(tmp_path: Path) -> None:
    with ReservedPorts() as ports, Scratch(tmp_path / "note") as scratch:
        host = LocalHost(python=sys.executable, environ={})
        agent = NodeAgent(1, host=host, bind="192.0.2.77", ports=ports, scratch=scratch, open_log=lambda: make_log(tmp_path)[0])
        agent.carry_out(orders_from(1, HoldPorts(names=("inference",))))
        beat = agent.beat()
    assert (beat.num_done, beat.ports) == (1, {})
    assert "'192.0.2.77' is not an address of this machine" in beat.port_error


def test_the_end_of_the_run_ends_every_process(node: Node) -> None:
    orders = [node.start(WAIT), node.start(WAIT, name="inference")]
    node.await_output()
    assert node.agent.exit_code is None
    node.order(EndRun(exit_code=5))
    assert node.agent.exit_code == 5
    assert all(node.state(order).exit_code in (-signal.SIGTERM, -signal.SIGKILL) for order in orders)
    assert node.host.spared == [()]
    assert node.agent.beat().num_done == 3
    assert "the run is over with exit code 5" in node.written.getvalue()


def test_processes_have_the_time_that_they_are_given_to_end(node: Node) -> None:
    heeding = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(4));"
    order = node.start(heeding + WAIT)
    node.await_output()
    node.agent.end_processes(timeout_s=END_TIMEOUT_S)
    assert node.state(order).exit_code == 4


def test_an_agent_that_begins_anew_keeps_its_ports_alone(node: Node) -> None:
    node.order(HoldPorts(names=("inference",)))
    node.start("pass")
    ports = node.agent.beat().ports
    node.agent.forget()
    assert node.agent.beat() == Beat(number=1, time=UNIX, num_done=0, ports=ports)
    node.agent.carry_out(orders_from(1, node.start_order("pass")))
    assert (node.agent.beat().num_done, len(node.host.started)) == (1, 2)


def test_the_agent_writes_into_the_log_of_its_node_once_it_has_a_process(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    node.agent.say("too early for a log")
    assert (node.written.getvalue(), capsys.readouterr().err) == ("", "node 1: too early for a log\n")
    node.order(node.start_order("pass"))
    node.agent.say("the first node is missed")
    assert node.written.getvalue().endswith("the first node is missed\n")
