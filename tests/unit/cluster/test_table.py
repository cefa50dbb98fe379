"""The driver knows what each node should run and what it has observed; a silent node is lost with its processes."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from support.fake_roles import FakeClock, make_facts, make_spec
from trivet.cluster.host import ClusterHost, ClusterProcess
from trivet.cluster.messages import Desired, LogPart, Observed, ObservedProcess
from trivet.cluster.table import NodeTable
from trivet.config.layout import RunLayout
from trivet.exits import NODE_LOST
from trivet.launcher.processes import Clock, RoleReports
from trivet.wire.status import ProcessReport

LOST_AFTER_S = 30.0


class Cluster:
    """A table of one node, the host that the supervisor has, and the node's actor, which does what it is told."""

    def __init__(self, directory: Path) -> None:
        self.clock = FakeClock()
        self.table = NodeTable({1: ("inference",)}, lost_after_s=LOST_AFTER_S)
        self.host = ClusterHost(self.table, clock=Clock(now=self.clock.now, sleep=self.sleep))
        self.layout = RunLayout(directory)
        self.number = 0
        self.facts = make_facts()
        self.processes: dict[int, ObservedProcess] = {}
        self.desired: Desired | None = None
        self.heeded: set[int] = set()
        """Signals that end a process."""

    def sleep(self, seconds: float) -> None:
        self.clock.sleep(seconds)
        self.exchange()

    def exchange(self, *, offset: float = 0.0, **changes: object) -> Desired:
        """Deliver what the node should run, then what it has observed."""
        desired = self.table.next_message(1)
        assert desired is not None
        self.desired = desired
        before, self.processes = self.processes, {}
        for number, signals in ((process.number, process.signals) for process in desired.processes):
            ended_by = next((-sent.number for sent in signals if sent.number in self.heeded), None)
            started = ObservedProcess(number=number, pid=700 + number, exit_code=ended_by)
            self.processes[number] = before.get(number, started) if ended_by is None else started
        self.observe(desired.session, offset=offset, **changes)
        return desired

    def observe(self, session: int, *, offset: float = 0.0, **changes: object) -> None:
        self.number += 1
        observed = Observed(
            **{
                "session": session,
                "observed_at": self.number,
                "time": self.clock.now() - offset,
                "facts": self.facts,
                "ports": {"inference": 4000},
                "processes": tuple(self.processes.values()),
                **changes,
            }
        )
        self.table.receive(1, observed, now=self.clock.now(), unix_time=self.clock.now())

    def start(self, name: str = "inference") -> ClusterProcess:
        process = self.host.start(replace(make_spec(self.layout, name), node=1))
        self.exchange()
        return process

    def note(self, process: ClusterProcess, **changes: object) -> None:
        self.processes[process.number] = ObservedProcess(**{"number": process.number, "pid": 700 + process.number, **changes})
        self.exchange()


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    made = Cluster(tmp_path)
    made.exchange()
    return made


def test_a_node_is_there_once_it_holds_its_ports(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    assert cluster.host.lost_nodes() == {1}
    cluster.exchange(ports={}, port_error="port 4000 is in use")
    assert cluster.host.lost_nodes() == {1}
    assert cluster.table.problems() == {1: "port 4000 is in use"}
    cluster.exchange()
    assert cluster.host.lost_nodes() == frozenset()
    node = cluster.host.nodes()[1]
    assert (node.host, node.machine.gpus, node.ports) == ("10.0.0.1", ("0",), {"inference": 4000})
    assert cluster.host.joined_nodes() == {1}
    assert cluster.host.joined_nodes() == frozenset()


def test_a_process_is_known_by_what_its_node_observes(cluster: Cluster) -> None:
    process = cluster.start()
    assert (process.pid, process.exit_code, process.log_offset) == (700 + process.number, None, 0)
    assert process.read_reports() == RoleReports()
    cluster.note(process, stopped=(9,))
    assert cluster.host.find_stopped([process]) == [(9,)]
    cluster.note(process, exit_code=-9)
    assert process.exit_code == -9


def test_a_message_that_arrives_twice_or_late_changes_nothing(cluster: Cluster) -> None:
    process = cluster.start()
    session = cluster.desired.session if cluster.desired is not None else 0
    cluster.note(process, exit_code=3)
    old = Observed(session=session, observed_at=1.0, time=0.0, facts=make_facts(), processes=())
    cluster.table.receive(1, old, now=cluster.clock.now(), unix_time=0.0)
    assert process.exit_code == 3
    assert cluster.table.next_message(1, only_news=True) is None


def test_files_of_a_process_and_positions_of_logs_are_part_of_what_is_desired(cluster: Cluster) -> None:
    cluster.exchange()
    part = LogPart(name="inference.stdout", offset=0, data=b"line")
    cluster.exchange(logs=(part,))
    cluster.exchange(logs=(part,))
    assert list(cluster.table.log_parts) == [part]
    assert cluster.exchange().received == {"inference.stdout": 4}
    cluster.table.begin_session(1)
    assert cluster.exchange().received == {}
    cluster.host = ClusterHost(cluster.table, clock=Clock(now=cluster.clock.now), read_files=lambda spec: {"name": spec.name})
    process = cluster.start()
    assert process.exit_code is None
    assert (cluster.layout.logs / "inference.stdout").read_bytes() == b"line"
    (desired,) = cluster.exchange().processes
    assert desired.files == {"name": "inference"}


def test_signals_are_part_of_what_is_desired(cluster: Cluster) -> None:
    process = cluster.start()
    process.signal_leader(signal.SIGUSR1)
    process.signal_group(signal.SIGTERM)
    process.show_stacks([1, 2])
    (desired,) = cluster.exchange().processes
    assert [(sent.number, sent.does_reach_group) for sent in desired.signals] == [
        (signal.SIGUSR1, False),
        (signal.SIGTERM, True),
    ]
    assert desired.shown_stacks == ((1, 2),)
    cluster.note(process, exit_code=0)
    process.signal_group(signal.SIGKILL)
    (desired,) = cluster.exchange().processes
    assert len(desired.signals) == 2


def test_a_process_that_is_started_again_takes_the_place_of_the_one_before(cluster: Cluster) -> None:
    first, second = cluster.start(), cluster.start()
    assert cluster.desired is not None
    assert [process.number for process in cluster.desired.processes] == [second.number]
    assert first.number != second.number


def test_a_sweep_keeps_what_is_spared(cluster: Cluster) -> None:
    kept, ended = cluster.start("inference"), cluster.start("trainer")
    cluster.host.end_orphans(spared=[kept])
    desired = cluster.exchange()
    assert ([process.number for process in desired.processes], desired.sweeps) == ([kept.number], 1)
    assert ended.number not in cluster.processes


def test_a_silent_node_is_lost_with_its_processes_and_returns_in_a_new_session(cluster: Cluster) -> None:
    ended, process = cluster.start("trainer"), cluster.start()
    cluster.note(ended, exit_code=3)
    assert ended.exit_code == 3
    before = cluster.desired
    assert before is not None
    cluster.clock.sleep(LOST_AFTER_S)
    assert process.exit_code is None
    cluster.clock.sleep(0.1)
    assert (process.exit_code, ended.exit_code) == (NODE_LOST, 3)
    assert cluster.host.lost_nodes() == {1}
    assert cluster.host.start(replace(make_spec(cluster.layout, "inference"), node=1)).exit_code == NODE_LOST
    cluster.observe(before.session)  # it was only cut off, and has not heard that it was lost
    assert cluster.host.lost_nodes() == {1}
    desired = cluster.exchange()
    assert (desired.session, desired.processes) == (before.session + 1, ())
    assert cluster.host.lost_nodes() == frozenset()
    assert (process.exit_code, ended.exit_code) == (NODE_LOST, 3)
    process.signal_group(signal.SIGKILL)
    process.show_stacks([702])
    assert cluster.table.next_message(1, only_news=True) is None


def test_a_node_whose_actor_ended_is_lost_at_once_until_another_answers(cluster: Cluster) -> None:
    process = cluster.start()
    cluster.table.begin_session(1)
    assert process.exit_code == NODE_LOST
    assert cluster.table.is_lost(1, now=cluster.clock.now())
    cluster.facts, cluster.number = make_facts("machine-2"), 0  # whose clock is another
    cluster.exchange()
    assert cluster.host.nodes()[1].name == "machine-2"
    assert cluster.desired is not None
    assert cluster.desired.preferred_ports == {"inference": 4000}


def test_reports_have_times_of_the_drivers_clock(cluster: Cluster) -> None:
    process = cluster.start()
    report = ProcessReport(role="inference", rank=0, pid=1, attempt=1, time=50.0, since=40.0)
    cluster.processes[process.number] = ObservedProcess(number=process.number, pid=1, reports=(report,), stamps={"a": (1, 2)})
    cluster.exchange(offset=3600.0)
    found = process.read_reports()
    assert [(each.time, each.since) for each in found.readable] == [(3650.0, 3640.0)]
    assert found.stamps == {"a": (1, 2)}


def test_a_node_that_is_leaving_says_so(cluster: Cluster) -> None:
    assert cluster.host.leaving_nodes() == frozenset()
    cluster.exchange(is_leaving=True)
    assert cluster.host.leaving_nodes() == {1}
    cluster.exchange(is_leaving=False)
    assert cluster.host.leaving_nodes() == frozenset()
    cluster.table.note_draining(["another", make_facts().ray_node])
    assert cluster.host.leaving_nodes() == {1}


@pytest.mark.parametrize(
    ("heeded", "is_hurried", "waited_s"),
    [({signal.SIGTERM, signal.SIGKILL}, False, 0), ({signal.SIGKILL}, False, 20), ({signal.SIGKILL}, True, 0)],
)
def test_processes_are_stopped_together(cluster: Cluster, heeded: set[int], is_hurried: bool, waited_s: float) -> None:
    processes, before, cluster.heeded = [cluster.start(), cluster.start("trainer")], cluster.clock.now(), heeded
    killed = cluster.host.stop(processes, timeout_s=20.0, is_hurried=lambda: is_hurried)
    ended_by, expected = (signal.SIGTERM, []) if signal.SIGTERM in heeded else (signal.SIGKILL, processes)
    assert (killed, [process.exit_code for process in processes]) == (expected, [-ended_by] * 2)
    assert cluster.clock.now() - before == pytest.approx(waited_s, abs=0.5)


def test_the_end_of_a_run_waits_for_every_node_that_is_there(cluster: Cluster) -> None:
    cluster.table.finish()
    assert cluster.exchange().is_over
    assert not cluster.table.is_finished
    cluster.exchange(is_over=True)
    assert cluster.table.is_finished
    cluster.exchange(is_over=False)
    cluster.table.begin_session(1)
    assert cluster.table.is_finished
