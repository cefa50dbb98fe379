"""Groups run on several nodes over real sockets. The pools of the nodes are stand-ins; both ends of the connection are real."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pytest
import zmq
import zmq.asyncio

from support.groups import make_request, make_sample
from support.processes import find_free_port
from trivet.config.schema.environment import EnvNodesConfig
from trivet.environments.nodes import node as node_module
from trivet.environments.nodes import pool_server
from trivet.environments.nodes.node_pools import NodePools, open_node_pools
from trivet.environments.nodes.pool_server import PoolServer
from trivet.errors import ConfigError, EnvironmentLoadError, RolloutFailed, WaitTimeout, WorkerLost
from trivet.secret import RunSecret
from trivet.wire.events import EnvLoad, Event
from trivet.wire.groups import EnvironmentInfo, GroupRequest, Split
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

    async def prompt(self, env: str, *, split: Split, example_id: int) -> list[dict[str, Any]]:
        return [{"role": "user", "content": f"{env} {example_id} of {self._pid}"}]

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
        server = PoolServer(pool, config, secret=secret)  # type: ignore[arg-type]
        self.serving[index] = asyncio.create_task(server.run())
        return server

    async def end(self, index: int) -> None:
        serving = self.serving.pop(index)
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving


Scenario = Callable[[Nodes, Callable[[], Any]], Awaitable[None]]


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_server, "_BEAT_INTERVAL_S", 0.02)
    monkeypatch.setattr("trivet.environments.nodes.node_pools._CHECK_INTERVAL_S", 0.05)


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

    asyncio.run(run())


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110  # of whatever the test can see
        await asyncio.sleep(0.01)


def test_each_group_runs_on_the_node_with_the_fewest_and_its_answer_comes_back() -> None:
    async def scenario(nodes: Nodes, opening: Callable[[], Any]) -> None:
        pools = [StandInPool(pid=index) for index in range(3)]
        for index, each in enumerate(pools):
            nodes.start(index, each)
        async with opening() as pool:
            groups = [asyncio.create_task(pool.run_group(ask(number))) for number in range(6)]
            await until(lambda: sum(len(each.running) for each in pools) == 6)
            assert [len(each.running) for each in pools] == [2, 2, 2]
            for each in pools:
                for number in list(each.running):
                    each.finish(number)
            for rollouts in await asyncio.gather(*groups):
                assert rollouts[0].reward == 1.0
                assert rollouts[0].samples[0].token_ids_T.tolist() == make_sample().token_ids_T.tolist()

    play(scenario, num_required=3)


def test_what_fails_on_a_node_fails_in_the_same_way_here_and_prompts_come_from_there() -> None:
    async def scenario(nodes: Nodes, opening: Callable[[], Any]) -> None:
        there = StandInPool(pid=1)
        nodes.start(1, there)
        async with opening() as pool:
            assert await pool.prompt("toy", split=Split.EVAL, example_id=3) == [{"role": "user", "content": "toy 3 of 1"}]
            failing, losing = (asyncio.create_task(pool.run_group(ask(number))) for number in (0, 1))
            await until(lambda: len(there.running) == 2)
            there.fail(0, RolloutFailed("no such tool", kind="ToolError"))
            there.fail(1, WorkerLost("was killed by SIGKILL"))
            with pytest.raises(RolloutFailed, match="no such tool") as failed:
                await failing
            assert failed.value.kind == "ToolError"
            with pytest.raises(WorkerLost, match="SIGKILL"):
                await losing

    play(scenario)


def test_a_group_that_was_lost_with_its_worker_goes_to_the_same_node_again() -> None:
    async def scenario(nodes: Nodes, opening: Callable[[], Any]) -> None:
        pools = [StandInPool(), StandInPool(pid=1)]
        for index, each in enumerate(pools):
            nodes.start(index, each)
        async with opening() as pool:
            groups = [asyncio.create_task(pool.run_group(ask(number))) for number in range(2)]
            await until(lambda: all(each.running for each in pools))
            [lost], [kept] = (list(each.running) for each in pools)
            pools[0].fail(lost, WorkerLost("was killed by SIGKILL"))
            with pytest.raises(WorkerLost, match="SIGKILL"):
                await groups[lost]
            new = asyncio.create_task(pool.run_group(ask(2)))  # goes to the same node, which then has as many as the other
            await until(lambda: pools[0].running)
            again = asyncio.create_task(pool.run_group(ask(lost)))
            await until(lambda: len(pools[0].running) + len(pools[1].running) == 3)
            assert lost in pools[0].running
            for each, number in ((pools[0], lost), (pools[0], 2), (pools[1], kept)):
                each.finish(number)
            await asyncio.gather(groups[kept], new, again)

    play(scenario, num_required=2)


def test_a_cancelled_group_is_cancelled_on_its_node() -> None:
    async def scenario(nodes: Nodes, opening: Callable[[], Any]) -> None:
        there = StandInPool()
        nodes.start(1, there)
        async with opening() as pool:
            group = asyncio.create_task(pool.run_group(ask(7)))
            await until(lambda: there.running)
            group.cancel()
            await until(lambda: there.cancelled == [7])

    play(scenario)


def test_a_node_that_falls_silent_loses_its_groups_and_another_runs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "LOST_AFTER_S", 0.3)

    async def scenario(nodes: Nodes, opening: Callable[[], Any]) -> None:
        here, there = StandInPool(), StandInPool(pid=1)
        nodes.start(0, here)
        nodes.start(1, there)
        async with opening() as pool:
            keeping = asyncio.create_task(pool.run())
            groups = [asyncio.create_task(pool.run_group(ask(number))) for number in range(2)]
            await until(lambda: here.running and there.running)
            [kept], [lost] = here.running, there.running
            await nodes.end(1)
            with pytest.raises(WorkerLost, match=r"nothing was heard from the environment workers of node 1 for 0\.3 s"):
                await groups[lost]
            again = asyncio.create_task(pool.run_group(ask(lost)))
            await until(lambda: lost in here.running)
            here.finish(kept)
            here.finish(lost)
            await asyncio.gather(groups[kept], again)
            keeping.cancel()

    play(scenario, num_required=2)


def test_workers_that_were_started_again_are_used_again_and_what_the_old_ones_had_is_lost() -> None:
    async def scenario(nodes: Nodes, opening: Callable[[], Any]) -> None:
        old, new = StandInPool(), StandInPool()
        nodes.start(1, old)
        async with opening() as pool:
            group = asyncio.create_task(pool.run_group(ask(0)))
            await until(lambda: old.running)
            await nodes.end(1)
            nodes.start(1, new)
            with pytest.raises(WorkerLost, match="node 1 were started again"):
                await group
            again = asyncio.create_task(pool.run_group(ask(0)))
            await until(lambda: new.running)
            new.finish(0)
            await again

    play(scenario)


def test_another_orchestrator_has_the_nodes_drop_the_groups_of_one_that_was_killed() -> None:
    async def scenario(nodes: Nodes, opening: Callable[[], Any]) -> None:
        there = StandInPool()
        nodes.start(1, there)
        async with opening() as pool:
            group = asyncio.create_task(pool.run_group(ask(0)))
            await until(lambda: there.running)
            pool._serving.cancel()  # nothing is said any more, as when the process is killed
            await asyncio.sleep(0)
        group.cancel()
        assert there.running
        async with opening() as pool:
            await until(lambda: there.cancelled == [0])
            again = asyncio.create_task(pool.run_group(ask(0)))
            await until(lambda: there.running)
            there.finish(0)
            await again

    play(scenario)


def test_an_answer_that_went_astray_costs_its_group_alone() -> None:
    async def scenario(nodes: Nodes, opening: Callable[[], Any]) -> None:
        there = StandInPool()
        nodes.start(1, there)
        async with opening() as pool:
            lost, kept = (asyncio.create_task(pool.run_group(ask(number))) for number in (0, 1))
            await until(lambda: len(there.running) == 2)
            there.running[0].cancel()  # it runs no more, and nothing is answered
            with pytest.raises(WorkerLost, match="the connection to node 1 lost it"):
                await lost
            there.finish(1)
            await kept

    play(scenario)


def test_metrics_status_and_events_are_those_of_all_nodes() -> None:
    async def scenario(nodes: Nodes, opening: Callable[[], Any]) -> None:
        here, there = StandInPool(pid=0), StandInPool(pid=1)
        nodes.start(0, here)
        nodes.start(1, there)
        async with opening() as pool:
            await until(lambda: len(pool.status()) == 2)
            pool.metrics()
            here.failed, there.failed = 2.0, 3.0
            seen = Counter[str]()
            await until(lambda: seen.update(pool.metrics()) or seen["failed_groups/toy/Error"] >= 5.0)
            assert seen["failed_groups/toy/Error"] == 5.0
            assert seen.keys() == {"worker/toy-0@0/pending", "worker/toy-0@1/pending", "failed_groups/toy/Error"}
            written: list[Event] = []
            pool.report_to(written.append)
            assert sorted(event.worker for event in written if isinstance(event, EnvLoad)) == ["of 0", "of 1"]

    play(scenario, num_required=2)


def test_a_node_with_other_data_is_refused() -> None:
    async def scenario(nodes: Nodes, opening: Callable[[], Any]) -> None:
        nodes.start(0, StandInPool())
        nodes.start(1, StandInPool(num_examples=6))
        with pytest.raises(EnvironmentLoadError, match=r"'toy' has other data on node (0|1) \([56] examples\) than elsewhere"):
            async with opening():
                pass

    play(scenario, num_required=2)


def test_a_node_that_is_not_there_holds_up_no_start_and_joins_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trivet.environments.nodes.node_pools._OTHERS_WITHIN_S", 0.1)

    async def scenario(nodes: Nodes, opening: Callable[[], Any]) -> None:
        here, there, other = StandInPool(), StandInPool(pid=1), StandInPool(num_examples=6)
        nodes.start(0, here)
        async with opening() as pool:
            first = asyncio.create_task(pool.run_group(ask(0)))
            await until(lambda: here.running)
            nodes.start(1, there)
            nodes.start(2, other)  # which has other data, and is left out
            await until(lambda: len(pool.status()) == 3)
            second, third = (asyncio.create_task(pool.run_group(ask(number))) for number in (1, 2))
            await until(lambda: len(here.running) + len(there.running) == 3)
            assert there.running
            assert not other.running
            for each in (here, there):
                for number in list(each.running):
                    each.finish(number)
            await asyncio.gather(first, second, third)

    play(scenario, num_required=2)


def test_a_start_waits_for_no_node_that_is_not_required() -> None:
    async def scenario(nodes: Nodes, opening: Callable[[], Any]) -> None:
        nodes.start(2, StandInPool())
        async with asyncio.timeout(20), opening():  # a start that waits takes `_OTHERS_WITHIN_S`, which is 60 s
            pass

    play(scenario, timeout_s=60)


def test_a_node_without_the_secret_is_not_heard() -> None:
    async def scenario(nodes: Nodes, opening: Callable[[], Any]) -> None:
        nodes.start(1, StandInPool(), secret=RunSecret(bytes(32)))
        with pytest.raises(WaitTimeout, match=r"have connected after 0\.5 s: .*orchestrator\.env_start_timeout_s"):
            async with opening():
                pass

    play(scenario, timeout_s=0.5)


def test_what_is_no_message_is_passed_over() -> None:
    async def scenario(nodes: Nodes, opening: Callable[[], Any]) -> None:
        nodes.start(1, StandInPool(pid=1))
        async with opening() as pool:
            context = zmq.asyncio.Context()
            stranger = context.socket(zmq.DEALER)
            node_module_key = pool_server.KEY_PURPOSE
            pool_server.connect_encrypted(
                stranger, host="127.0.0.1", port=nodes.config.port, key=SECRET.derive(node_module_key)
            )
            await stranger.send(b"\x81\xa4what")
            assert (await pool.prompt("toy", split=Split.EVAL, example_id=1))[0]["content"] == "toy 1 of 1"
            context.destroy(linger=0)

    play(scenario)


def test_a_port_that_is_taken_is_named() -> None:
    async def scenario(nodes: Nodes, opening: Callable[[], Any]) -> None:
        taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", nodes.config.port)
        with pytest.raises(
            ConfigError, match=rf"workers on 127\.0\.0\.1:{nodes.config.port}: .*end the program that listens there"
        ):
            NodePools(nodes.config, secret=SECRET)
        taken.close()

    play(scenario)


def test_a_node_with_a_wrong_number_gets_no_group(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(nodes: Nodes, opening: Callable[[], Any]) -> None:
        there, wrong = StandInPool(), StandInPool()
        nodes.start(3, wrong)
        nodes.start(2, there)
        async with opening() as pool:
            await until(lambda: "it has the node number 3, not 0 to 2" in caplog.text)
            groups = [asyncio.create_task(pool.run_group(ask(number))) for number in range(4)]
            await until(lambda: len(there.running) == 4)
            assert not wrong.running
            for number in range(4):
                there.finish(number)
            await asyncio.gather(*groups)

    play(scenario)


def test_an_older_process_of_a_node_disturbs_no_group_of_the_newer_one() -> None:
    """The older one may be of an earlier attempt of the run, on a machine that was cut off for a while."""

    async def scenario(nodes: Nodes, opening: Callable[[], Any]) -> None:
        old, new = StandInPool(pid=1), StandInPool(pid=2)
        nodes.start(1, old)
        async with opening() as pool:
            lost = asyncio.create_task(pool.run_group(ask(0)))
            await until(lambda: old.running)
            older = nodes.serving.pop(1)
            nodes.start(1, new)
            with pytest.raises(WorkerLost, match="node 1 were started again"):
                await lost
            group = asyncio.create_task(pool.run_group(ask(0)))
            await until(lambda: new.running)
            await until(lambda: old.cancelled == [0])  # the older one is heard, and told to stop
            await asyncio.sleep(0.2)  # it beats ten times more
            assert not group.done()
            assert not old.running
            assert [worker.pid for worker in pool.status()] == [2]
            new.finish(0)
            await group
            older.cancel()
            await asyncio.gather(older, return_exceptions=True)

    play(scenario)


def test_a_node_that_drains_finishes_its_groups_gets_no_others_and_ends() -> None:
    async def scenario(nodes: Nodes, opening: Callable[[], Any]) -> None:
        leaving, staying = StandInPool(pid=0), StandInPool(pid=1)
        server = nodes.start(0, leaving)
        async with opening() as pool:
            first = asyncio.create_task(pool.run_group(ask(0)))
            await until(lambda: leaving.running)
            assert server.drain()
            assert not server.drain()
            on_its_way = asyncio.create_task(pool.run_group(ask(1)))  # sent before the orchestrator knows
            await until(lambda: len(leaving.running) == 2)
            nodes.start(1, staying)
            await until(lambda: len(pool.status()) == 2)
            others = [asyncio.create_task(pool.run_group(ask(number))) for number in (2, 3)]
            await until(lambda: len(staying.running) == 2)
            leaving.finish(0, reward=0.5)
            assert (await first)[0].reward == 0.5
            await asyncio.sleep(0.1)  # five beats, in which the other group still runs
            assert not nodes.serving[0].done()
            leaving.finish(1)
            await on_its_way
            await nodes.serving[0]
            assert leaving.cancelled == []
            for number in (2, 3):
                staying.finish(number)
            await asyncio.gather(*others)

    play(scenario)


def test_what_a_draining_node_does_not_finish_in_time_is_run_elsewhere() -> None:
    async def scenario(nodes: Nodes, opening: Callable[[], Any]) -> None:
        leaving, staying = StandInPool(pid=0), StandInPool(pid=1)
        server = nodes.start(0, leaving, drain_timeout_s=0.2)
        async with opening() as pool:
            group = asyncio.create_task(pool.run_group(ask(0)))
            await until(lambda: leaving.running)
            nodes.start(1, staying)
            server.drain()
            with pytest.raises(WorkerLost, match="node 0, which leaves, lost it"):
                await group
            again = asyncio.create_task(pool.run_group(ask(0)))
            await until(lambda: staying.running)
            staying.finish(0)
            await again
            await nodes.serving[0]
            assert leaving.cancelled == [0]

    play(scenario)


def test_a_node_that_serves_no_orchestrator_drains_at_once() -> None:
    async def scenario(nodes: Nodes, opening: Callable[[], Any]) -> None:
        there = StandInPool()
        server = nodes.start(1, there)
        async with opening() as pool:
            group = asyncio.create_task(pool.run_group(ask(0)))
            await until(lambda: there.running)
        await until(lambda: there.cancelled == [0])  # the orchestrator said that it ends
        group.cancel()
        server.drain()
        await nodes.serving[1]

    play(scenario)
