"""Environment nodes for tests: the pools are stand-ins; both ends of their connections are real."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pytest

from support.groups import make_request, make_sample
from support.processes import find_free_port
from trivet.config.schema.environment import EnvNodesConfig
from trivet.environments.nodes import pool_server
from trivet.environments.nodes.node_pools import open_node_pools
from trivet.environments.nodes.pool_server import PoolServer
from trivet.secret import RunSecret
from trivet.wire.events import EnvLoad, Event
from trivet.wire.groups import EnvironmentInfo, Example, GroupRequest, Split
from trivet.wire.rollouts import Rollout
from trivet.wire.status import WorkerStatus

SECRET = RunSecret(bytes(range(32)))


class StandInPool:
    """A pool whose groups end when the test says so."""

    def __init__(self, *, num_examples: int = 5, pid: int = 1) -> None:
        self.infos = {"toy": EnvironmentInfo(num_examples=num_examples)}
        self.running: dict[int, asyncio.Future[list[Rollout]]] = {}
        self.cancelled: list[int] = []
        self.failed = 0.0
        self._pid = pid

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        future = self.running[request.group_id] = asyncio.get_running_loop().create_future()
        try:
            return await future
        except asyncio.CancelledError:
            self.cancelled.append(request.group_id)
            raise
        finally:
            del self.running[request.group_id]

    def finish(self, group_id: int, *, reward: float = 1.0) -> None:
        self.running[group_id].set_result([Rollout(index=0, reward=reward, samples=[make_sample()])])

    def fail(self, group_id: int, error: Exception) -> None:
        self.running[group_id].set_exception(error)

    async def example(self, env: str, *, split: Split, example_id: int) -> Example:
        return Example(prompt=[{"role": "user", "content": f"{env} {example_id} of {self._pid}"}])

    async def run(self) -> None:
        await asyncio.Event().wait()

    def status(self) -> Sequence[WorkerStatus]:
        return [WorkerStatus(env="toy", pid=self._pid)]

    def metrics(self) -> Mapping[str, float]:
        values = {f"worker/toy-0@{self._pid}/pending": float(len(self.running)), "failed_groups/toy/Error": self.failed}
        self.failed = 0.0
        return values

    def report_to(self, write_event: Callable[[Event], None]) -> None:
        write_event(EnvLoad(env="toy", package="", api="v0", verifiers="", python="", worker=f"of {self._pid}"))

    async def aclose(self) -> None:
        pass


def ask(group_id: int) -> GroupRequest:
    return make_request(group_id, env="toy", num_rollouts=1)


class Nodes:
    """The nodes that the test starts and ends."""

    def __init__(self, config: EnvNodesConfig) -> None:
        self.config = config
        self.serving: dict[int, asyncio.Task[None]] = {}

    def start(self, index: int, pool: StandInPool, *, secret: RunSecret = SECRET, **changes: object) -> PoolServer:
        config = self.config.model_copy(update={"own": index, **changes})
        server = PoolServer(pool, config, secret=secret, read_config=lambda: self.config)  # type: ignore[arg-type]
        self.serving[index] = asyncio.create_task(server.run())
        return server

    async def end(self, index: int) -> None:
        serving = self.serving.pop(index)
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving


Scenario = Callable[[Nodes, Callable[[], Any]], Awaitable[None]]


def play(scenario: Scenario, *, num_required: int = 1, timeout_s: float = 10.0) -> None:
    async def run() -> None:
        config = EnvNodesConfig(own=0, num_required=num_required, max_nodes=3, host="127.0.0.1", port=find_free_port())
        nodes = Nodes(config)

        def opening() -> Any:
            return open_node_pools(nodes.config, secret=SECRET, timeout_s=timeout_s)

        try:
            async with asyncio.timeout(30):
                await scenario(nodes, opening)
        finally:
            for index in list(nodes.serving):
                await nodes.end(index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_server, "_BEAT_INTERVAL_S", 0.02)
        patch.setattr(pool_server, "_FOLLOW_INTERVAL_S", 0.02)
        patch.setattr("trivet.environments.nodes.node_pools._CHECK_INTERVAL_S", 0.05)
        asyncio.run(run())


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110  # of whatever the test can see
        await asyncio.sleep(0.01)
