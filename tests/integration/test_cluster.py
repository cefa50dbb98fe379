"""One run on a Ray cluster: real Ray, real roles, real vLLM and gloo, each machine a namespace that can be lost."""

from pathlib import Path

import pytest

from support.cluster_run import ClusterRun
from support.node_run import START_S, prove
from support.nodes import can_make_nodes
from support.processes import wait_until
from support.ray_nodes import make_ray_nodes
from trivet.checkpoints.run_record import read_run

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not can_make_nodes(), reason="making network namespaces needs root and ip")]


def test_a_run_goes_on_when_a_machine_that_serves_is_lost_and_comes_back(tmp_path: Path, tiny_model: Path) -> None:
    with make_ray_nodes(3, directory=tmp_path) as nodes:
        run = ClusterRun(tmp_path, tiny_model, nodes, max_steps=12)
        run.start_ray(1, 2)
        driver = run.start()
        run.await_step(2)
        serving = run.machine_of("inference")
        nodes.lose(serving)
        run.await_said("inference lost with its node, restart in")
        nodes.connect(serving)
        nodes.boot(serving)
        run.join(serving)
        assert driver.wait(START_S) == 0, run.everything()
        record = read_run(run.layout)
        assert record is not None
        assert record.attempt == 1  # the trainer never noticed
        assert run.machines_of("trainer") + run.machines_of("inference") == []
        prove(run.layout)


def test_a_killed_actor_is_replaced_and_the_run_goes_on_without_help(tmp_path: Path, tiny_model: Path) -> None:
    with make_ray_nodes(3, directory=tmp_path) as nodes:
        run = ClusterRun(tmp_path, tiny_model, nodes, max_steps=14)
        run.start_ray(1, 2)
        driver = run.start()
        run.await_step(8)
        training = run.machine_of("trainer")
        pids = nodes.roles(training)
        nodes.kill_actor(training)
        run.await_said("the actor of node 0 has ended, and its processes with it")
        wait_until(lambda: not set(pids) & set(nodes.pids(training)), timeout_s=5, waiting_for="the end of its processes")
        assert driver.wait(START_S) == 0, run.everything()
        record = read_run(run.layout)
        assert record is not None
        assert record.attempt == 2
        prove(run.layout)
