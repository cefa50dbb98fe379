"""Environment workers of other nodes: the real processes of these nodes, on loopback, with an environment that misbehaves."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
from trivet.environments.nodes.node_pools import NodePools, open_node_pools
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
        env_nodes=EnvNodesConfig(own=0, max_nodes=4, host="127.0.0.1", port=find_free_port()),
    )


@contextmanager
def other_node(config: OrchestratorConfig, directory: Path, *, number: int = 1) -> Iterator["subprocess.Popen[bytes]"]:
    """Start the workers of a node, as the launcher there does. At the end nothing of the node may be left."""
    file = directory / "orchestrator.toml"
    file.write_text(to_toml(config))
    words = module_command(
        "trivet.orchestrator.environment_node", "@", str(file), "--env-nodes.own", str(number), python=sys.executable
    )
    with (directory / "node.log").open("ab") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": str(ENVIRONMENTS)})
    started = [psutil.Process(process.pid)]
    try:
        yield process
        if process.poll() is None:
            started += descendants_of(process.pid)
            process.terminate()
            assert process.wait(20) == 0, (directory / "node.log").read_text()
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
        async with open_node_pools(config.env_nodes, secret=secret, timeout_s=120) as pool:
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


NUM_RUNNERS = 6
"""Groups in flight while nodes come and go."""


class Flow:
    """Runs groups one after another in each of several tasks, again when they are lost, until it is told to stop."""

    def __init__(self, pool: NodePools, url: str) -> None:
        self.num_done = 0
        self.losses: list[str] = []
        self.is_over = False
        self._pool = pool
        self._url = url
        self._numbers = itertools.count()

    async def run(self) -> None:
        while not self.is_over:
            number = next(self._numbers)
            while not await self._finish(number):
                pass
            self.num_done += 1

    async def _finish(self, number: int) -> bool:
        try:
            rollouts = await self._pool.run_group(ask("slow", self._url, group_id=number))  # 2 s
        except WorkerLost as exc:
            self.losses.append(str(exc))
            return False
        assert [rollout.index for rollout in rollouts] == [0, 1]
        return True

    async def until_done(self, more: int) -> None:
        """Wait until so many more groups are done."""
        wanted = self.num_done + more
        while self.num_done < wanted:  # noqa: ASYNC110  # the flow's tasks count
            await asyncio.sleep(0.1)


def test_groups_flow_while_one_node_is_lost_one_joins_and_one_is_drained(config: OrchestratorConfig, tmp_path: Path) -> None:
    async def scenario(url: str, nodes: ExitStack) -> None:
        assert config.env_nodes is not None
        secret = find_secret(RunLayout(config.output_dir), environ={})
        lost, drained = (nodes.enter_context(other_node(config, tmp_path, number=number)) for number in (1, 2))
        required = config.env_nodes.model_copy(update={"num_required": 2})
        async with asyncio.timeout(400), open_node_pools(required, secret=secret, timeout_s=120) as pool:

            async def until_used(node: "subprocess.Popen[bytes]") -> None:
                def is_used() -> bool:
                    own = {process.pid for process in descendants_of(node.pid)}
                    return any(worker.pid in own and worker.num_pending for worker in pool.status())

                while not is_used():  # noqa: ASYNC110  # the node's next beat tells
                    await asyncio.sleep(0.1)

            keeping = asyncio.create_task(pool.run())
            flow = Flow(pool, url)
            async with asyncio.TaskGroup() as tasks:
                for _ in range(NUM_RUNNERS):
                    tasks.create_task(flow.run())
                await until_used(drained)
                await until_used(lost)
                lost.kill()
                joined = nodes.enter_context(other_node(config, tmp_path, number=3))
                await until_used(joined)
                await flow.until_done(NUM_RUNNERS)
                await until_used(drained)
                drained.terminate()
                assert await asyncio.to_thread(drained.wait, 60) == 0, (tmp_path / "node.log").read_text()
                await flow.until_done(NUM_RUNNERS)
                flow.is_over = True
            assert flow.losses  # of the node that was killed alone: the drained one finished what it ran
            assert all("node 1" in loss for loss in flow.losses), flow.losses
            keeping.cancel()

    with serve_fake(FakeInference()) as url, ExitStack() as nodes:
        asyncio.run(scenario(url, nodes))
