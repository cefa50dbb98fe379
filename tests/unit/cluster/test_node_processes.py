"""A node runs what the driver desires, with real processes and ports, and observes it."""

import os
import signal
import socket
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest

from support.fake_roles import make_facts, make_spec, write_report
from support.processes import assert_port_free, find_free_port, is_alive, kill_all, wait_until
from trivet.cluster.messages import Desired, DesiredProcess, Observed, ObservedProcess, SentSignal, decode, encode
from trivet.cluster.node_processes import NodeProcesses
from trivet.cluster.own_directory import OwnDirectory
from trivet.config.layout import RunLayout
from trivet.launcher.plan import ProcessSpec
from trivet.launcher.processes import Child, Clock, LocalHost
from trivet.launcher.run_directory import Scratch
from trivet.process.sockets import ReservedPorts, is_reserved

HOST = "127.0.0.1"
UNIX = 1_000_000.0
WAIT = "import time; print('up', flush=True); time.sleep(60)"
WAIT_WITH_CHILD = (
    "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
    "print(child.pid, flush=True); child.wait()"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingChild(Child):
    shown: list[tuple[int, ...]] = field(default_factory=list)

    def show_stacks(self, pids: Iterable[int]) -> None:
        self.shown.append(tuple(pids))


class Node:
    """The processes of node 1 with what they need, and a driver that sends it one message after another."""

    def __init__(self, directory: Path, held: ExitStack, *, bind: str = HOST, own: OwnDirectory | None = None) -> None:
        self.layout = RunLayout(directory)
        self.local = LocalHost(python=sys.executable, environ=os.environ)
        self.scratch = held.enter_context(Scratch(directory / ".scratch.1"))
        self.ports = held.enter_context(ReservedPorts())
        self.started: list[RecordingChild] = []
        self.spared: list[Collection[Child]] = []
        self.said: list[str] = []
        host = SimpleNamespace(  # calls that would reach processes which other tests started are only recorded
            start=self._start,
            end_orphans=lambda *, spared=(): self.spared.append(spared),
            find_stopped=self.local.find_stopped,
        )
        ports, scratch, say = self.ports, self.scratch, self.said.append
        clock = Clock(unix_time=lambda: UNIX)
        self.processes = NodeProcesses(
            host=host, facts=make_facts(host=bind), ports=ports, scratch=scratch, say=say, own=own, clock=clock
        )  # type: ignore[arg-type]  # acts as one
        self.number = 0
        self.apply()
        self.spared.clear()  # what ran before the first session was ended

    def _start(self, spec: ProcessSpec) -> Child:
        child = self.local.start(spec)
        self.started.append(RecordingChild(spec=spec, process=child.process, log_offset=child.log_offset))
        return self.started[-1]

    def apply(self, *processes: DesiredProcess, **changes: object) -> bool:
        """Have the node run what is desired; return whether it was new to it."""
        self.number += 1
        desired = Desired(
            **{"session": 1, "number": self.number, "seen": 0, "listeners": (), "processes": processes, **changes}
        )
        return self.processes.apply(decode(encode(desired), Desired))

    def process(self, program: str, *, number: int = 1, name: str = "trainer") -> DesiredProcess:
        spec = make_spec(self.layout, name)
        return DesiredProcess(number=number, spec=replace(spec, argv=(sys.executable, "-c", program), env={"PLACE": "node 1"}))

    def observe(self, number: int = 1) -> ObservedProcess:
        return next(process for process in self.processes.observe().processes if process.number == number)

    def await_line(self, name: str = "trainer") -> str:
        log = self.layout.log_file(f"{name}.stdout")
        wait_until(lambda: log.exists() and log.read_text().endswith("\n"), timeout_s=20, waiting_for=f"a line of {name}")
        return log.read_text()

    def close(self) -> None:
        for child in self.started:
            with suppress(psutil.NoSuchProcess):
                kill_all(psutil.Process(child.pid).children(recursive=True))
        self.local.stop(self.started, timeout_s=0.0)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with ExitStack() as held:
        node = Node(tmp_path, held)
        held.callback(node.close)
        yield node


def test_a_process_is_started_once_with_its_environment_and_its_log(node: Node) -> None:
    first = node.process("import os; print(os.environ['PLACE'], os.environ['TMPDIR'], flush=True); raise SystemExit(3)")
    assert node.apply(first)
    assert node.started[0].process.wait(20) == node.observe().exit_code == 3
    assert not node.apply(first)
    assert node.apply(first, second := node.process(WAIT, number=2, name="inference"))
    node.number = 0
    assert not node.apply(first, second, node.process(WAIT, number=3, name="orchestrator"))  # it was overtaken
    assert [child.spec.name for child in node.started] == ["trainer", "inference"]
    assert node.await_line() == f"node 1 {node.scratch.directory}\n"
    assert node.said[0] == f"started trainer pid={node.started[0].pid} log={first.spec.log}"
    assert node.processes.exit_codes == (3, None)


@pytest.mark.parametrize(("does_reach_group", "number"), [(True, signal.SIGKILL), (False, signal.SIGTERM)])
def test_a_signal_reaches_a_process_or_its_whole_group(node: Node, does_reach_group: bool, number: signal.Signals) -> None:
    node.apply(process := node.process(WAIT_WITH_CHILD))
    child = psutil.Process(int(node.await_line()))
    try:
        node.apply(msgspec.structs.replace(process, signals=(SentSignal(number=number, does_reach_group=does_reach_group),)))
        assert node.started[0].process.wait(20) == -number
        if does_reach_group:
            wait_until(lambda: not is_alive(child), timeout_s=20, waiting_for="the end of the group")
        else:
            assert is_alive(child)
    finally:
        kill_all([child])


def test_signals_and_requests_for_stacks_are_carried_out_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(Child, "signal_leader", lambda _, number: sent.append(number))
    node.apply(process := node.process(WAIT))
    user, term = (SentSignal(number=number, does_reach_group=False) for number in (signal.SIGUSR1, signal.SIGTERM))
    for told in (
        msgspec.structs.replace(process, signals=(user,), shown_stacks=((7, 8),)),
        msgspec.structs.replace(process, signals=(user, term), shown_stacks=((7, 8), (9,))),
    ):
        node.apply(told)
        node.apply(told, sweeps=node.number)
    assert sent == [signal.SIGUSR1, signal.SIGTERM]
    assert node.started[0].shown == [(7, 8), (9,)]


def test_a_process_that_cannot_be_started_has_an_exit_code_at_once(node: Node) -> None:
    node.layout.logs.write_text("a file where the directory of logs should be")
    node.apply(process := node.process("pass"))
    assert node.observe() == ObservedProcess(number=1, pid=0, exit_code=127)
    assert node.said[0].startswith("trainer cannot be started: ")
    term = SentSignal(number=signal.SIGTERM, does_reach_group=True)
    node.apply(msgspec.structs.replace(process, signals=(term,), shown_stacks=((7,),)), sweeps=1)
    assert (node.started, node.spared) == ([], [[]])


def test_a_second_process_of_one_name_takes_the_place_of_the_first(node: Node) -> None:
    node.apply(node.process(WAIT))
    node.apply(node.process("raise SystemExit(3)", number=2))
    assert [child.process.wait(20) for child in node.started] == [-signal.SIGKILL, 3]
    assert [process.number for process in node.processes.observe().processes] == [2]


def test_a_sweep_kills_what_is_no_longer_desired(node: Node) -> None:
    kept, ended = node.process(WAIT), node.process(WAIT, number=2, name="inference")
    node.apply(kept, ended)
    node.apply(kept)
    assert node.processes.exit_codes == (None, None)
    node.apply(kept, sweeps=1)
    assert node.started[1].process.wait(20) == -signal.SIGKILL
    assert (node.spared, node.processes.exit_codes) == ([[node.started[0]]], (None,))


def test_a_new_session_ends_the_processes_of_the_old_one_and_keeps_the_ports(node: Node) -> None:
    node.apply(node.process(WAIT), listeners=("inference",))
    before = node.processes.observe()
    node.apply(session=2, listeners=("inference",))
    after = node.processes.observe()
    assert (node.started[0].process.wait(20), node.spared) == (-signal.SIGKILL, [()])
    assert ((before.session, len(before.processes)), (after.session, after.processes)) == ((1, 1), (2, ()))
    assert after.ports == before.ports
    assert after.observed_at > before.observed_at


def test_reports_and_stopped_processes_are_observed(node: Node) -> None:
    node.apply(process := node.process(WAIT))
    node.await_line()
    write_report(node.layout, "trainer", pid=7)
    stop = SentSignal(number=signal.SIGSTOP, does_reach_group=True)
    node.apply(msgspec.structs.replace(process, signals=(stop,)))
    wait_until(lambda: node.observe().reports and node.observe().stopped, timeout_s=20, waiting_for="report and stop")
    node.processes.is_leaving = True
    observed = node.processes.observe()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(observed), type=Observed) == observed
    assert (observed.time, observed.is_leaving) == (UNIX, True)
    seen, stat = observed.processes[0], node.layout.report_file("trainer", 0).stat()
    assert (seen.pid, seen.stopped, seen.exit_code) == (node.started[0].pid, (node.started[0].pid,), None)
    assert ([report.pid for report in seen.reports], seen.stamps) == ([7], {"trainer": (stat.st_ino, stat.st_mtime_ns)})


def test_ports_are_held_at_the_nodes_address_and_stay(node: Node) -> None:
    wanted = find_free_port()
    with socket.create_server((HOST, taken := find_free_port())):
        node.apply(listeners=("inference", "transport"), preferred_ports={"inference": wanted, "transport": taken})
    ports = node.processes.observe().ports
    assert (ports["inference"], ports["transport"] != taken) == (wanted, True)
    assert all(is_reserved(HOST, port) for port in ports.values())
    node.apply(listeners=("inference", "rendezvous"), preferred_ports={"inference": find_free_port()})
    assert node.processes.observe().ports.items() > ports.items()
    node.ports.close()
    assert_port_free(wanted)


def test_a_node_with_its_own_directory_tells_an_exit_together_with_the_last_lines(tmp_path: Path) -> None:
    with ExitStack() as held:
        own = OwnDirectory(tmp_path / "own", output_dir=tmp_path)
        node = Node(tmp_path, held, own=own)
        held.callback(node.close)
        files = {str(node.layout.secret): "secret", str(node.layout.configs / "a.toml"): "text"}
        program = (
            "import sys; from pathlib import Path; print(Path(sys.argv[1]).read_text(), *sys.argv[2:], 'x' * 100_000);"
            "raise SystemExit(3)"
        )
        process = node.process(program)
        argv = (*process.spec.argv, str(node.layout.configs / "a.toml"))
        process = msgspec.structs.replace(process, spec=replace(process.spec, argv=argv), files=files)
        node.apply(process)
        assert node.started[0].process.wait(20) == 3
        observed = node.processes.observe()
        (part,) = observed.logs
        assert part.data.startswith(f"text --output-dir {own.layout.root} x".encode())
        assert (observed.processes[0].exit_code, node.processes.exit_codes) == (None, (3,))
        assert node.apply(process, received={"trainer.stdout": len(part.data)})
        observed = node.processes.observe()
        assert (observed.processes[0].exit_code, observed.logs[0].data[-2:]) == (3, b"x\n")
        assert not node.layout.logs.exists()


def test_a_node_says_why_it_holds_no_ports(tmp_path: Path) -> None:
    with ExitStack() as held:
        node = Node(tmp_path, held, bind="192.0.2.77")
        node.apply(listeners=("inference",))
        observed = node.processes.observe()
    assert observed.ports == {}
    assert "'192.0.2.77' is not an address of this machine" in observed.port_error
