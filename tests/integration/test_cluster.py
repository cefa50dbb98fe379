"""One run on a Ray cluster: real Ray, real roles, real vLLM and gloo, each machine a namespace that can be lost."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from support.cluster_run import ENVIRON, START_S, ClusterRun, prove
from support.nodes import can_make_nodes
from support.processes import wait_until
from support.ray_nodes import make_ray_nodes
from support.tiny_models import tiny_model_writer
from trivet.checkpoints.run_record import read_run

NO_FENCE = Path(__file__).parents[1] / "support" / "no_fence"
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


def test_a_run_goes_back_to_its_checkpoint_on_the_machines_that_are_left(tmp_path: Path, tiny_model: Path) -> None:
    with make_ray_nodes(4, directory=tmp_path) as nodes:
        run = ClusterRun(tmp_path, tiny_model, nodes, max_steps=16, num_train_nodes=2, keys="min_train_nodes = 1\n")
        run.start_ray(1, 2, 3)
        driver = run.start()
        run.await_step(8)
        first = run.machine_of("orchestrator")  # no machine is special: the one of rank 0 is lost
        nodes.lose(first)
        run.await_said("attempt 2 from step 6")
        assert driver.wait(START_S) == 0, run.everything()
        assert "inference" not in "".join(line for line in run.output().splitlines() if "restarted from" in line)
        prove(run.layout)


@pytest.mark.parametrize("has_fence", [True, False])
def test_a_machine_that_is_cut_off_runs_nothing_once_others_do_its_work(
    tmp_path: Path, tiny_model: Path, has_fence: bool
) -> None:
    with make_ray_nodes(4, directory=tmp_path) as nodes:
        run = ClusterRun(tmp_path, tiny_model, nodes, max_steps=16, num_train_nodes=2, keys="min_train_nodes = 1\n")
        run.start_ray(1, 2, 3, environ={} if has_fence else {"PYTHONPATH": f"{NO_FENCE}{os.pathsep}{ENVIRON['PYTHONPATH']}"})
        driver = run.start()
        run.await_step(8)
        (cut,) = set(run.machines_of("trainer")) - {run.machine_of("orchestrator")}
        nodes.disconnect(cut)
        overlaps = 0
        deadline = time.monotonic() + START_S
        while "attempt 2 from step 6" not in run.output() or not set(run.machines_of("trainer")) - {cut}:
            assert time.monotonic() < deadline, run.everything()
            time.sleep(0.2)
        for _ in range(10):
            overlaps += cut in run.machines_of("trainer")
            time.sleep(0.2)
        assert bool(overlaps) is not has_fence
        nodes.connect(cut)
        assert driver.wait(START_S) == 0, run.everything()
        prove(run.layout)


def test_nothing_is_left_on_any_machine_after_the_driver_is_killed(tmp_path: Path, tiny_model: Path) -> None:
    with make_ray_nodes(3, directory=tmp_path) as nodes:
        run = ClusterRun(tmp_path, tiny_model, nodes, max_steps=1000)
        run.start_ray(1, 2)
        driver = run.start()
        run.await_step(8)
        os.killpg(driver.pid, signal.SIGKILL)
        roles = ("trainer", "orchestrator", "inference")
        wait_until(lambda: not any(map(run.machines_of, roles)), timeout_s=5, waiting_for="the end of all roles")
        resumed = run.start("--ckpt.resume-step", "-1", "--max-steps", "12")
        assert resumed.wait(START_S) == 0, run.everything()
        prove(run.layout)


def test_environment_nodes_of_their_own_join_are_drained_and_lost(tmp_path: Path, tiny_model: Path) -> None:
    keys = "num_env_nodes = 1\nmax_env_nodes = 2\nenv_cpus_per_node = 1\nenv_resources = { sandbox = 1 }\n"
    with make_ray_nodes(5, directory=tmp_path) as nodes:
        run = ClusterRun(tmp_path, tiny_model, nodes, max_steps=100_000, keys=keys)
        run.start_ray(1, 2)
        nodes.join(3, resources={"sandbox": 1}, environ=ENVIRON)
        driver = run.start()
        run.await_step(2)
        assert run.machines_of("env-workers") == [3]
        nodes.join(4, resources={"sandbox": 1}, environ=ENVIRON)
        run.await_that(lambda: set(run.machines_of("env-workers")) == {3, 4}, "the second environment node")
        nodes.drain(3)
        run.await_that(lambda: run.machines_of("env-workers") == [4], "the end of the workers on a machine that is taken away")
        nodes.lose(3)
        nodes.connect(3)
        nodes.boot(3)
        nodes.join(3, resources={"sandbox": 1}, environ=ENVIRON)
        run.await_that(lambda: set(run.machines_of("env-workers")) == {3, 4}, "workers on the machine that is back")
        nodes.lose(4)
        run.await_said("env-workers-3 lost with its node")
        num_steps = run.output().count("trainer SUCCESS Step")
        run.await_that(lambda: run.output().count("trainer SUCCESS Step") > num_steps + 20, "steps on the node that is left")
        os.killpg(driver.pid, signal.SIGTERM)
        run.await_said("interrupted after")
        roles = ("trainer", "orchestrator", "inference", "env-workers")
        wait_until(lambda: not any(map(run.machines_of, roles)), timeout_s=60, waiting_for="the end of all roles")
        record = read_run(run.layout)
        assert record is not None
        assert record.attempt == 1  # the trainer never noticed
        assert not list(run.layout.logs.glob("env_workers/*[!@1-9].log"))  # none ran beside the orchestrator
        prove(run.layout)


def test_a_server_over_two_machines_loads_policies_and_starts_again_when_a_shard_fails(tmp_path: Path) -> None:
    tiny_model_writer(hidden_size=128)(tmp_path / "model")  # one attention head for each rank
    with make_ray_nodes(4, directory=tmp_path) as nodes:
        run = ClusterRun(tmp_path, tmp_path / "model", nodes, max_steps=10, nodes_per_server=2)
        # All machines are one, whose cores vLLM would share out.
        run.start_ray(1, 2, 3, environ={"VLLM_CPU_OMP_THREADS_BIND": "nobind"})
        driver = run.start("--max-async-level", "0")
        run.await_step(3)
        url = run.layout.servers.read_text()
        (second,) = [machine for machine in run.machines_of("inference") if nodes.address(machine) not in url]
        os.kill(nodes.find(second, "trivet.inference.main"), signal.SIGKILL)
        run.await_said("inference-shard-1 killed by SIGKILL: inference and inference-shard-1 restarted")
        assert driver.wait(2 * START_S) == 0, run.everything()
        record = read_run(run.layout)
        assert record is not None
        assert record.attempt == 1  # the trainer never noticed
        # Every other batch is sampled from the newest policy. Had a rank kept old weights, its tokens would be less likely here.
        steps = [json.loads(line) for line in (run.layout.metrics / "trainer.jsonl").read_text().splitlines()]
        exact = [step["step"] for step in steps if step["mismatch_kl/mean"] < 1e-6]
        assert len(exact) >= 4, steps
        assert exact[-1] > 5, steps
        prove(run.layout)
