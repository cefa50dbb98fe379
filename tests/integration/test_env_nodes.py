"""Environment workers of another node: the real process of that node, on loopback, with an environment that misbehaves."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from support.environments.unruly import WAYS
from support.fake_inference import FakeInference
from support.groups import make_request
from support.http_fake import serve_fake
from support.processes import assert_all_gone, descendants_of, find_free_port
from trivet.config.dump import to_toml
from trivet.config.layout import RunLayout
from trivet.config.schema.environment import EnvConfig, EnvNodesConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.environments.nodes.node_pools import open_node_pools
from trivet.errors import RolloutFailed, WorkerLost
from trivet.process.lifetime import module_command
from trivet.secret import find_secret
from trivet.wire.groups import GroupRequest

ENVIRONMENTS = Path(__file__).parents[1] / "support" / "environments"


@pytest.fixture
def config(tmp_path: Path) -> OrchestratorConfig:
    layout = RunLayout(tmp_path / "outputs")
    layout.root.mkdir()
    layout.logs.mkdir()
    return OrchestratorConfig(
        output_dir=layout.root,
        rollouts_per_example=2,
        env=[EnvConfig(id="unruly")],
        env_nodes=EnvNodesConfig(nodes=[1], own=0, host="127.0.0.1", port=find_free_port()),
    )


@contextmanager
def other_node(config: OrchestratorConfig, directory: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Start the workers of node 1, as the launcher there does."""
    file = directory / "orchestrator.toml"
    file.write_text(to_toml(config))
    words = module_command(
        "trivet.orchestrator.environment_node", "@", str(file), "--env-nodes.own", "1", python=sys.executable
    )
    with (directory / "node.log").open("ab") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": str(ENVIRONMENTS)})
    started = [psutil.Process(process.pid)]
    try:
        yield process
        started += descendants_of(process.pid)
        process.terminate()
        assert process.wait(20) == 143, (directory / "node.log").read_text()
    finally:
        process.kill()
        process.wait()
    assert_all_gone(started)


def ask(way: str, url: str, *, group_id: int) -> GroupRequest:
    return make_request(group_id, env="unruly", example_id=WAYS.index(way), url=url)


def test_groups_run_in_the_workers_of_another_node_which_is_restarted_after_a_loss(
    config: OrchestratorConfig, tmp_path: Path
) -> None:
    async def scenario(url: str) -> None:
        assert config.env_nodes is not None
        secret = find_secret(RunLayout(config.output_dir), environ={})
        async with open_node_pools(None, config.env_nodes, secret=secret, timeout_s=120) as pool:
            assert pool.infos["unruly"].num_examples == len(WAYS)
            keeping = asyncio.create_task(pool.run())
            rollouts = await pool.run_group(ask("well", url, group_id=0))
            assert [rollout.index for rollout in rollouts] == [0, 1]
            assert all(rollout.samples[0].num_loss_tokens > 0 for rollout in rollouts)
            with pytest.raises(RolloutFailed) as failed:
                await pool.run_group(ask("raise", url, group_id=1))
            assert failed.value.kind == "ValueError"
            while not pool.status():  # noqa: ASYNC110  # it comes with the next beat
                await asyncio.sleep(0.05)
            [worker] = pool.status()
            os.kill(worker.pid, signal.SIGKILL)
            with pytest.raises(WorkerLost, match="killed by SIGKILL"):
                await pool.run_group(ask("well", url, group_id=2))
            assert len(await pool.run_group(ask("well", url, group_id=2))) == 2
            log = RunLayout(config.output_dir).env_worker_log("unruly@1")
            assert "environment loaded env=unruly" in log.read_text()
            keeping.cancel()

    with serve_fake(FakeInference()) as url, other_node(config, tmp_path):
        asyncio.run(scenario(url))
