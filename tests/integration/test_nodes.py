"""One run over several nodes: real roles, real vLLM and gloo, each node a network namespace that can be lost."""

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from support.cluster_run import ENVIRON, START_S, prove
from support.node_run import NodeRun
from support.nodes import Nodes, can_make_nodes, make_nodes
from support.tiny_models import tiny_model_writer
from trivet.checkpoints.run_record import read_run

pytestmark = pytest.mark.skipif(not can_make_nodes(), reason="making network namespaces needs root and ip")


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
        prove(run.layout)


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
        prove(run.layout)


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


def test_a_server_over_two_nodes_loads_policies_and_starts_again_when_one_node_fails(tmp_path: Path) -> None:
    environ = {**ENVIRON, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # both nodes are one machine, whose cores vLLM would share out
    tiny_model_writer(hidden_size=128)(tmp_path / "model")  # one attention head for each rank
    with make_nodes(3) as nodes:
        run = NodeRun(tmp_path, tmp_path / "model", nodes, max_steps=10, num_train_nodes=1, num_servers=1, nodes_per_server=2)
        on_policy = ("--max-async-level", "0")
        for node in (2, 1, 0):
            run.start(node, *on_policy, environ=environ)
        head = nodes.processes[-1]
        run.await_step(3)
        os.kill(find_pid(nodes, 2, "trivet.inference.main"), signal.SIGKILL)
        run.await_said("inference-shard-1 killed by SIGKILL")
        assert head.wait(2 * START_S) == 0, run.everything()
        assert [process.wait(30) for process in nodes.processes] == [0, 0, 0]
        assert [nodes.pids(node) for node in range(3)] == [[], [], []]
        record = read_run(run.layout)
        assert record is not None
        assert record.attempt == 1  # the trainer never noticed
        assert "inference-shard-1 killed by SIGKILL: inference and inference-shard-1 restarted" in run.output()
        # Every other batch is sampled from the newest policy. Had a rank kept old weights, its tokens would be less likely here.
        steps = [json.loads(line) for line in (run.layout.metrics / "trainer.jsonl").read_text().splitlines()]
        exact = [step["step"] for step in steps if step["mismatch_kl/mean"] < 1e-6]
        assert len(exact) >= 4, steps
        assert exact[-1] > 5, steps
        prove(run.layout)


def test_environment_workers_of_another_node_are_lost_and_come_back(tmp_path: Path, tiny_model: Path) -> None:
    with make_nodes(2) as nodes:
        run = NodeRun(tmp_path, tiny_model, nodes, max_steps=12, num_train_nodes=1, num_servers=1)
        workers = ("--deployment.env-worker-nodes", "[1]")
        run.start(1, *workers)
        head = run.start(0, *workers)
        run.await_step(2)
        os.kill(find_pid(nodes, 1, "trivet.orchestrator.environment_node"), signal.SIGKILL)
        run.await_said("env-workers-1 killed by SIGKILL")
        assert head.wait(START_S) == 0, run.everything()
        assert [process.wait(30) for process in nodes.processes] == [0, 0]
        assert [nodes.pids(node) for node in range(2)] == [[], []]
        record = read_run(run.layout)
        assert record is not None
        assert record.attempt == 1  # the trainer never noticed
        assert not list(run.layout.logs.glob("env_workers/*[!@1].log"))  # none ran beside the orchestrator
        prove(run.layout)


def find_pid(nodes: Nodes, node: int, module: str) -> int:
    """Return the process of a node that runs a module."""
    return next(pid for pid in nodes.pids(node) if module in psutil.Process(pid).cmdline())
