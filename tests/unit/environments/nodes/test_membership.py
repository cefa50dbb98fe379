"""Nodes with environment workers join a run, leave it and drain, over real sockets."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from support.node_pools import Nodes, StandInPool, ask, play, until
from trivet.errors import WaitTimeout, WorkerLost
from trivet.secret import RunSecret


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
