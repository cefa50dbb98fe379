"""The nodes of a run are one host to the supervisor: it starts, signals and stops processes wherever they are."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from support.fake_roles import FakeClock, make_spec
from trivet.cluster.host import ClusterHost, ClusterProcess
from trivet.cluster.messages import Desired, DesiredProcess, Observed, ObservedProcess
from trivet.cluster.table import NodeTable
from trivet.config.layout import RunLayout
from trivet.exits import NODE_LOST
from trivet.launcher.processes import Clock, RoleReports

LOST_AFTER_S = 30.0
HEEDED = {signal.SIGTERM, signal.SIGKILL}


class Cluster:
    """A host of two nodes, whose actors do what they are told. Their processes end with a signal of `heeded`."""

    def __init__(self, directory: Path) -> None:
        self.layout = RunLayout(directory)
        self.clock = FakeClock()
        self.table = NodeTable({1: (), 2: ()}, lost_after_s=LOST_AFTER_S)
        self.host = ClusterHost(self.table, clock=Clock(now=self.clock.now, sleep=self.sleep))
        self.heeded = HEEDED
        self.silent: set[int] = set()
        self.desired: dict[int, Desired] = {}
        self.num_observed = 0

    def sleep(self, seconds: float) -> None:
        self.clock.sleep(seconds)
        for node in set(self.table.nodes) - self.silent:
            desired = self.table.next_message(node)
            assert desired is not None
            self.desired[node], self.num_observed = desired, self.num_observed + 1
            processes, now = tuple(map(self._observe, desired.processes)), self.clock.now()
            observed = Observed(
                session=desired.session, number=self.num_observed, time=now, processes=processes, is_over=desired.is_over
            )
            self.table.receive(node, observed, now=now, unix_time=now)

    def _observe(self, process: DesiredProcess) -> ObservedProcess:
        ended_by = next((-sent.number for sent in process.signals if sent.number in self.heeded), None)
        return ObservedProcess(number=process.number, pid=700 + process.number, exit_code=ended_by)

    def start(self, name: str = "inference", *, node: int = 1) -> ClusterProcess:
        return self.host.start(replace(make_spec(self.layout, name), node=node))


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    made = Cluster(tmp_path)
    made.sleep(0.0)
    return made


def test_a_node_starts_what_was_planned(cluster: Cluster) -> None:
    process = cluster.start()
    assert (process.pid, process.exit_code, process.log_offset) == (0, None, 0)
    assert (cluster.host.read_reports(process), cluster.host.find_stopped([process])) == (RoleReports(), [()])
    cluster.sleep(0.0)
    assert [each.spec for each in cluster.desired[1].processes] == [process.spec]
    assert cluster.desired[2].processes == ()
    process.spec.log.parent.mkdir(parents=True)
    process.spec.log.write_text("of the attempt before\n")
    assert cluster.start().log_offset == 22


def test_an_exit_code_stays_when_its_node_is_lost_and_a_lost_process_gets_no_signals(cluster: Cluster) -> None:
    ended, lost = cluster.start(), cluster.start("trainer")
    ended.signal_group(signal.SIGKILL)
    cluster.sleep(0.0)
    cluster.silent = {1}
    cluster.sleep(LOST_AFTER_S)
    assert (ended.exit_code, lost.exit_code) == (-signal.SIGKILL, None)
    cluster.sleep(0.1)
    assert (ended.pid, ended.exit_code, lost.exit_code, lost.pid) == (0, -signal.SIGKILL, NODE_LOST, 0)
    cluster.silent = set()
    cluster.sleep(0.0)
    lost.signal_group(signal.SIGKILL)
    cluster.host.show_stacks(lost, [702])
    assert cluster.table.next_message(1, only_news=True) is None


@pytest.mark.parametrize(
    ("heeded", "is_hurried", "waited_s"), [(HEEDED, False, 0), ({signal.SIGKILL}, False, 20), ({signal.SIGKILL}, True, 0)]
)
def test_processes_of_all_nodes_are_stopped_together(
    cluster: Cluster, heeded: set[signal.Signals], is_hurried: bool, waited_s: float
) -> None:
    cluster.heeded = heeded
    processes = [cluster.start(), cluster.start("trainer", node=2)]
    before = cluster.clock.now()
    killed = cluster.host.stop(processes, timeout_s=20.0, is_hurried=lambda: is_hurried)
    ended_by, expected = (signal.SIGTERM, []) if signal.SIGTERM in heeded else (signal.SIGKILL, processes)
    assert (killed, [process.exit_code for process in processes]) == (expected, [-ended_by] * 2)
    assert cluster.clock.now() - before == pytest.approx(waited_s, abs=0.5)


def test_the_end_of_a_run_waits_for_every_node_that_is_there(cluster: Cluster) -> None:
    cluster.silent = {2}
    cluster.table.finish()
    cluster.sleep(0.0)
    assert cluster.desired[1].is_over
    assert not cluster.table.is_finished
    cluster.table.end(2)
    assert cluster.table.is_finished
