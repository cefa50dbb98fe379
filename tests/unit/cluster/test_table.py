"""The driver knows what each node should run and what it has observed; a silent node is lost with its processes."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from support.fake_roles import FakeClock, make_spec
from trivet.cluster.host import ClusterHost, ClusterProcess
from trivet.cluster.messages import Desired, NodeFacts, Observed, ObservedProcess
from trivet.cluster.table import NodeTable
from trivet.config.layout import RunLayout
from trivet.exits import NODE_LOST
from trivet.launcher.processes import Clock
from trivet.wire.status import ProcessReport

LOST_AFTER_S = 30.0


def make_facts(name: str = "machine-1") -> NodeFacts:
    return NodeFacts(
        name=name,
        host="10.0.0.1",
        interface="eth0",
        gpus=("3",),
        num_cpus=2,
        version="1.0",
        has_working_dir=True,
        does_see_lock=True,
        ray_node="abc",
        niceness=0,
    )


class Cluster:
    """A table of one node, the host that the supervisor has, and the node's actor, which does what it is told."""

    def __init__(self, directory: Path) -> None:
        self.clock = FakeClock()
        self.table = NodeTable({1: ("inference",)}, lost_after_s=LOST_AFTER_S)
        self.host = ClusterHost(self.table, clock=Clock(now=self.clock.now, sleep=self.clock.sleep))
        self.layout = RunLayout(directory)
        self.number = 0
        self.processes: dict[int, ObservedProcess] = {}
        self.desired: Desired | None = None

    def exchange(self, *, offset: float = 0.0, **changes: object) -> Desired:
        """Deliver what the node should run, then what it has observed."""
        desired = self.table.next_message(1)
        assert desired is not None
        self.desired = desired
        known = {
            process.number: ObservedProcess(number=process.number, pid=700 + process.number) for process in desired.processes
        }
        self.processes = {number: self.processes.get(number, process) for number, process in known.items()}
        self.observe(desired.session, offset=offset, **changes)
        return desired

    def observe(self, session: int, *, offset: float = 0.0, **changes: object) -> None:
        self.number += 1
        observed = Observed(
            **{
                "session": session,
                "number": self.number,
                "time": self.clock.now() - offset,
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
    made.table.describe(1, make_facts())
    made.exchange()
    return made


def test_a_node_is_there_once_it_is_described_and_holds_its_ports(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    assert cluster.host.lost_nodes() == {1}
    cluster.table.describe(1, make_facts())
    cluster.exchange(ports={}, port_error="port 4000 is in use")
    assert cluster.host.lost_nodes() == {1}
    assert cluster.table.problems() == {1: "port 4000 is in use"}
    cluster.exchange()
    assert cluster.host.lost_nodes() == frozenset()
    node = cluster.host.nodes()[1]
    assert (node.host, node.machine.gpus, node.ports) == ("10.0.0.1", ("3",), {"inference": 4000})
    assert cluster.host.joined_nodes() == {1}
    assert cluster.host.joined_nodes() == frozenset()


def test_a_process_is_known_by_what_its_node_observes(cluster: Cluster) -> None:
    process = cluster.start()
    assert (process.pid, process.exit_code) == (700 + process.number, None)
    cluster.note(process, stopped=(9,))
    assert cluster.host.find_stopped([process]) == [(9,)]
    cluster.note(process, exit_code=-9)
    assert process.exit_code == -9


def test_a_message_that_arrives_twice_or_late_changes_nothing(cluster: Cluster) -> None:
    process = cluster.start()
    session = cluster.desired.session if cluster.desired is not None else 0
    cluster.note(process, exit_code=3)
    old = Observed(session=session, number=1, time=0.0, processes=())
    cluster.table.receive(1, old, now=cluster.clock.now(), unix_time=0.0)
    assert process.exit_code == 3
    assert cluster.table.next_message(1, only_news=True) is None


def test_signals_are_part_of_what_is_desired(cluster: Cluster) -> None:
    process = cluster.start()
    process.signal_leader(signal.SIGUSR1)
    process.signal_group(signal.SIGTERM)
    cluster.host.show_stacks(process, [1, 2])
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
    process = cluster.start()
    before = cluster.desired
    assert before is not None
    cluster.clock.sleep(LOST_AFTER_S)
    assert process.exit_code is None
    cluster.clock.sleep(0.1)
    assert process.exit_code == NODE_LOST
    assert cluster.host.lost_nodes() == {1}
    assert cluster.host.start(replace(make_spec(cluster.layout, "inference"), node=1)).exit_code == NODE_LOST
    cluster.observe(before.session)  # it was only cut off, and has not heard that it was lost
    assert cluster.host.lost_nodes() == {1}
    desired = cluster.exchange()
    assert (desired.session, desired.processes) == (before.session + 1, ())
    assert cluster.host.lost_nodes() == frozenset()
    assert process.exit_code == NODE_LOST


def test_a_node_whose_actor_ended_is_lost_at_once_until_another_describes_itself(cluster: Cluster) -> None:
    process = cluster.start()
    cluster.table.end(1)
    assert process.exit_code == NODE_LOST
    assert cluster.table.is_lost(1, now=cluster.clock.now())
    cluster.table.describe(1, make_facts("machine-2"))
    cluster.number = 0  # another actor counts anew
    cluster.exchange()
    assert cluster.host.nodes()[1].name == "machine-2"
    assert cluster.desired is not None
    assert cluster.desired.preferred_ports == {"inference": 4000}


def test_reports_have_times_of_the_drivers_clock(cluster: Cluster) -> None:
    process = cluster.start()
    report = ProcessReport(role="inference", rank=0, pid=1, attempt=1, time=50.0, since=40.0)
    cluster.processes[process.number] = ObservedProcess(number=process.number, pid=1, reports=(report,), stamps={"a": (1, 2)})
    cluster.exchange(offset=3600.0)
    found = cluster.host.read_reports(process)
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


def test_the_thread_that_exchanges_passes_on_its_error(cluster: Cluster) -> None:
    cluster.table.fail(OSError("gone"))
    with pytest.raises(OSError, match="gone"):
        cluster.host.lost_nodes()
