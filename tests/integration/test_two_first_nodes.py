"""Two first nodes of one run, where the shared file system keeps no locks between machines: exactly one of them leads it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cluster_run import ENVIRON, START_S
from support.groups import make_group
from support.histories import assert_proven
from support.node_chaos import AWAIT_MOUNT, SLOW_DIRECTORY, can_mount
from support.nodes import Nodes, can_make_nodes, make_nodes
from support.processes import wait_until
from support.rl_run import CONFIG
from trivet.checkpoints.commit import committed_steps
from trivet.checkpoints.run_record import read_run
from trivet.config.layout import RunLayout
from trivet.history.check import check_run
from trivet.orchestrator.checkpoint import write_rollouts
from trivet.process.lifetime import module_command
from trivet.telemetry.events import read_events
from trivet.wire.events import Commit, Start
from trivet.wire.versions import Step

pytestmark = [
    pytest.mark.skipif(not can_make_nodes(), reason="making network namespaces needs root and ip"),
    pytest.mark.skipif(not can_mount(), reason="locks of each machine need mfusepy and Debian's fuse3"),
]
MAX_STEPS = 40
ONE_NODE = """
[deployment]
type = "multi_node"
num_infer_nodes = 0
gpus_per_node = 0
lost_after_s = 10
"""
"""The first node is the only one: it trains on recorded rollouts."""
MOUNTED = f'( "$PYTHON" "$SLOW_DIRECTORY" "$OUTPUT_DIR" /none "$LOCKS" & ); {AWAIT_MOUNT}; exec "$@"'


class TwoMachines:
    """Two machines on which the command of the first node can be started, each with locks of its own."""

    def __init__(self, directory: Path, model: Path, nodes: Nodes) -> None:
        self.layout, self.nodes = RunLayout(directory / "outputs"), nodes
        self.layout.root.mkdir()
        self._directory, self._config = directory, directory / "rl.toml"
        text = CONFIG.format(max_steps=MAX_STEPS, output_dir=self.layout.root, model=model)
        self._config.write_text(text + ONE_NODE)
        record = RunLayout(directory / "recorded")
        rewards = (0.0, 1.0, 0.0, 1.0)
        for step in range(1, MAX_STEPS + 1):
            groups = [make_group(4 * step + number, rewards) for number in range(4)]
            write_rollouts(record, Step(step), groups, run_id="recorded", is_replayable=True)
        self._flags = (
            "--orchestrator.replay",
            str(record.root),
            "--trainer.max-mismatch-kl",
            "1000",
            "--trainer.optim.lr",
            "1e-5",
        )

    def start(self, machine: int, *flags: str) -> "subprocess.Popen[bytes]":
        locks = self._directory / f"locks_{machine}"
        locks.mkdir(exist_ok=True)
        environ = {
            **ENVIRON,
            "PYTHON": sys.executable,
            "SLOW_DIRECTORY": str(SLOW_DIRECTORY),
            "OUTPUT_DIR": str(self.layout.root),
            "LOCKS": str(locks),
        }
        words = ("@", str(self._config), "--deployment.node-rank", "0", *self._flags, *flags)
        command = ["sh", "-ec", MOUNTED, "sh", *module_command("trivet.launcher.commands.rl", *words)]
        return self.nodes.start(machine, command, log=self._directory / f"machine_{machine}.out", environ=environ)

    def output(self, machine: int) -> str:
        return (self._directory / f"machine_{machine}.out").read_text()

    def everything(self) -> str:
        return "\n\n".join(
            self.output(machine)[-6000:] for machine in range(2) if (self._directory / f"machine_{machine}.out").exists()
        )

    def signal_all(self, machine: int, number: signal.Signals) -> None:
        for pid in self.nodes.pids(machine):
            os.kill(pid, number)

    def await_commit(self, after: int) -> int:
        """Wait for a commit of a later step than `after`; return its step."""
        try:
            wait_until(lambda: max(committed_steps(self.layout), default=0) > after, timeout_s=START_S, waiting_for="a commit")
        except AssertionError as exc:
            raise AssertionError(f"{exc}: {self.everything()}") from None
        return committed_steps(self.layout)[-1]


@pytest.fixture
def machines(tmp_path: Path, tiny_model: Path) -> Iterator[TwoMachines]:
    with make_nodes(2) as nodes:
        yield TwoMachines(tmp_path, tiny_model, nodes)


def test_of_two_first_nodes_that_start_at_once_one_leads(machines: TwoMachines) -> None:
    started = [machines.start(machine) for machine in range(2)]
    codes = [process.wait(2 * START_S) for process in started]
    assert sorted(codes) == [0, 2], machines.everything()
    assert "leads the run in output_dir" in machines.output(codes.index(2))
    report = assert_proven(check_run(machines.layout))
    assert (report.last_step, report.starts) == (MAX_STEPS, {"orchestrator": 1, "trainer": 1})


def test_a_first_node_that_was_frozen_gives_way_to_the_one_that_came_instead(machines: TwoMachines) -> None:
    frozen = machines.start(0)
    step = machines.await_commit(after=0)
    machines.signal_all(0, signal.SIGSTOP)
    second = machines.start(1, "--ckpt.resume-step", "-1")
    machines.await_commit(after=max(step, committed_steps(machines.layout)[-1]))
    machines.signal_all(0, signal.SIGCONT)
    assert frozen.wait(60) in (2, 75), machines.everything()
    assert second.wait(START_S) == 0, machines.everything()
    record = read_run(machines.layout)
    assert record is not None
    assert record.attempt == 2
    report = assert_proven(check_run(machines.layout))
    assert (report.last_step, report.starts) == (MAX_STEPS, {"orchestrator": 2, "trainer": 2})
    events = list(read_events(machines.layout.events))
    (resumed,) = {event.from_step for event in events if isinstance(event, Start) and event.attempt == 2}
    assert {event.attempt for event in events if isinstance(event, Commit) and event.step > resumed} == {2}
