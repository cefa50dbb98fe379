"""Groups run on several nodes over real sockets. The pools of the nodes are stand-ins; both ends of the connection are real."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import zmq
import zmq.asyncio

from support.groups import make_sample
from support.node_pools import SECRET, Nodes, StandInPool, ask, play, until
from support.processes import find_free_port
from trivet.environments.nodes import node as node_module
from trivet.environments.nodes import pool_server
from trivet.environments.nodes.node_pools import NodePools
from trivet.errors import ConfigError, EnvironmentLoadError, RolloutFailed, WorkerLost
from trivet.wire.events import EnvLoad, Event
from trivet.wire.groups import Split


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
            assert (await pool.example("toy", split=Split.EVAL, example_id=3)).prompt == [
                {"role": "user", "content": "toy 3 of 1"}
            ]
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


@pytest.mark.parametrize("does_move", [False, True])
def test_another_orchestrator_has_the_nodes_drop_the_groups_of_one_that_was_killed(does_move: bool) -> None:
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
        if does_move:  # its node was lost, and it is started on another
            nodes.config = nodes.config.model_copy(update={"port": find_free_port()})
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
            assert (await pool.example("toy", split=Split.EVAL, example_id=1)).prompt[0]["content"] == "toy 1 of 1"
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
