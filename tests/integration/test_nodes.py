"""One run over several nodes: real roles, real vLLM and gloo, each node a network namespace that can be lost."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.nodes import Nodes, can_make_nodes, make_nodes
from support.processes import wait_until
from support.rl_run import CONFIG, ENVIRONMENTS
from trivet.config.layout import RunLayout
from trivet.launcher.run_directory import read_run
from trivet.process.lifetime import module_command

pytestmark = pytest.mark.skipif(not can_make_nodes(), reason="making network namespaces needs root and ip")

DEPLOYMENT = """
[deployment]
type = "multi_node"
num_train_nodes = {num_train_nodes}
num_infer_replicas = {num_servers}
gpus_per_node = 0
lost_after_s = 10

[recovery]
max_restarts = 10
"""
START_S = 300.0
ENVIRON = {
    **os.environ,
    "PYTHONPATH": str(ENVIRONMENTS),
    "WANDB_MODE": "disabled",
    "HF_HUB_OFFLINE": "1",
}


class NodeRun:
    """One run whose command is started on each of its nodes."""

    def __init__(
        self, directory: Path, model: Path, nodes: Nodes, *, max_steps: int, num_train_nodes: int, num_servers: int
    ) -> None:
        self.layout = RunLayout(directory / "outputs")
        self.nodes = nodes
        self.count = num_train_nodes + num_servers
        self._config = directory / "rl.toml"
        text = CONFIG.format(max_steps=max_steps, output_dir=self.layout.root, model=model)
        self._config.write_text(text + DEPLOYMENT.format(num_train_nodes=num_train_nodes, num_servers=num_servers))
        self._directory = directory

    def start(self, node: int, *flags: str) -> "subprocess.Popen[bytes]":
        command = module_command(
            "trivet.launcher.commands.rl", "@", str(self._config), "--deployment.node-rank", str(node), *flags
        )
        return self.nodes.start(node, command, log=self._directory / f"node_{node}.out", environ=ENVIRON)

    def output(self, node: int = 0) -> str:
        return (self._directory / f"node_{node}.out").read_text()

    def everything(self) -> str:
        logs = [self._directory / f"node_{node}.out" for node in range(self.count)]
        logs += sorted(self.layout.logs.rglob("*.stdout"))
        return "\n\n".join(f"{log.name}:\n{log.read_text(errors='replace')[-3000:]}" for log in logs if log.exists())

    def await_step(self, step: int) -> None:
        self.await_that(lambda: self.layout.weights_step(step).exists() or self.has_passed(step), f"step {step}")

    def has_passed(self, step: int) -> bool:
        return f"trainer SUCCESS Step {step} " in self.output()

    def await_said(self, words: str) -> None:
        self.await_that(lambda: words in self.output(), words)

    def await_that(self, condition, what: str) -> None:
        try:
            wait_until(condition, timeout_s=START_S, waiting_for=what)
        except AssertionError as exc:
            raise AssertionError(f"{exc}: {self.everything()}") from None


def check(layout: RunLayout) -> None:
    """Prove the run's history with `trivet check`."""
    command = module_command("trivet.tools.cli", "check", str(layout.root), python=sys.executable)
    checked = subprocess.run(command, capture_output=True, text=True, env=ENVIRON, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_run_goes_on_when_a_node_that_serves_is_lost_and_comes_back(tmp_path: Path, tiny_model: Path) -> None:
    with make_nodes(2) as nodes:
        run = NodeRun(tmp_path, tiny_model, nodes, max_steps=12, num_train_nodes=1, num_servers=1)
        run.start(1)
        head = run.start(0)
        run.await_step(2)
        nodes.lose(1)
        run.await_said("inference lost with its node, restart in")
        nodes.connect(1)
        run.start(1)
        assert head.wait(START_S) == 0, run.everything()
        assert [process.wait(30) for process in nodes.processes[2:]] == [0]
        assert [nodes.pids(node) for node in range(2)] == [[], []]
        assert "WARNING inference lost with its node" in run.output()
        record = read_run(run.layout)
        assert record is not None
        assert record.attempt == 1  # the trainer never noticed
        assert not run.layout.control.exists()
        check(run.layout)


@pytest.mark.slow
def test_a_run_goes_back_to_its_checkpoint_when_a_node_that_trains_is_lost(tmp_path: Path, tiny_model: Path) -> None:
    with make_nodes(3) as nodes:
        run = NodeRun(tmp_path, tiny_model, nodes, max_steps=16, num_train_nodes=2, num_servers=1)
        for node in (2, 1):
            run.start(node)
        head = run.start(0)
        run.await_step(8)
        nodes.lose(1)
        run.await_said("trainer-1 lost with its node")
        nodes.connect(1)
        run.start(1)
        assert head.wait(START_S) == 0, run.everything()
        record = read_run(run.layout)
        assert record is not None
        assert record.attempt == 2
        assert "attempt 2 from step 6" in run.output()
        check(run.layout)


@pytest.mark.slow
def test_a_lost_head_ends_the_rest_within_a_minute(tmp_path: Path, tiny_model: Path) -> None:
    with make_nodes(2) as nodes:
        run = NodeRun(tmp_path, tiny_model, nodes, max_steps=1000, num_train_nodes=1, num_servers=1)
        agent = run.start(1)
        run.start(0)
        run.await_step(2)
        nodes.lose(0)
        assert agent.wait(60) == 75
        assert nodes.pids(1) == []
        assert "has not heard from the first node" in run.output(1)
