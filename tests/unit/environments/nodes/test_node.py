"""A node says what the test has it say, at times of the test's clock."""

import asyncio

import pytest

from support.groups import make_request
from trivet.environments.nodes.node import RemoteNode
from trivet.errors import WorkerLost
from trivet.wire.groups import EnvironmentInfo
from trivet.wire.worker_nodes import FromNode, NodeBeat, StartSession, ToNode
from trivet.wire.workers import CallAnswer, Cancel, GroupDone

LOADED = NodeBeat(newest_call=-1, running=[], infos={"toy": EnvironmentInfo(num_examples=5)})


class Wire:
    """The connection of a node."""

    def __init__(self) -> None:
        self.posted: list[ToNode] = []
        self.node = RemoteNode(1, post=lambda _, message: self.posted.append(message))
        self.say(NodeBeat(newest_call=-1, running=[]), at=0.0, session="")
        self.session = self.posted[-1].session
        self.say(LOADED, at=0.0)

    def say(self, body: NodeBeat | CallAnswer, *, at: float, session: str | None = None) -> None:
        given = self.session if session is None else session
        self.node.receive(b"line", FromNode(node=1, instance=1, session=given, body=body), now=at)


def test_a_node_that_is_always_one_order_behind_is_well_and_one_that_misses_an_order_is_lost() -> None:
    async def scenario() -> None:
        wire = Wire()
        groups = []
        for number in range(40):
            groups.append(asyncio.create_task(wire.node.run_group(make_request(number, env="toy"))))
            await asyncio.sleep(0)
            wire.say(NodeBeat(newest_call=number - 1, running=list(range(number))), at=float(number))
            assert wire.node.check(now=float(number)) == ""
        for at in range(40, 56):
            wire.say(NodeBeat(newest_call=38, running=list(range(39))), at=float(at))
        assert wire.node.check(now=55.5) == "groups do not reach the environment workers of node 1"
        for result in await asyncio.gather(*groups, return_exceptions=True):
            assert isinstance(result, WorkerLost)

    asyncio.run(scenario())


def test_what_a_cut_line_swallowed_is_asked_for_again_and_a_late_answer_costs_nothing() -> None:
    async def scenario() -> None:
        wire = Wire()
        wire.node.infos = None  # as if its answer to the new session had not come
        num_posted = len(wire.posted)
        wire.say(NodeBeat(newest_call=-1, running=[]), at=1.0)
        assert [message.body for message in wire.posted[num_posted:]] == [StartSession()]
        wire.say(LOADED, at=1.0)
        lost, kept, dropped = (asyncio.create_task(wire.node.run_group(make_request(number, env="toy"))) for number in range(3))
        await asyncio.sleep(0)
        dropped.cancel()
        await asyncio.sleep(0)
        num_posted = len(wire.posted)
        wire.say(NodeBeat(newest_call=2, running=[1, 2]), at=2.0)
        assert [message.body for message in wire.posted[num_posted:]] == [Cancel(call_id=2)]  # the first was lost too
        with pytest.raises(WorkerLost, match="the connection to node 1 lost it"):
            await lost
        wire.say(GroupDone(call_id=0, rollouts=[]), at=3.0)
        wire.say(GroupDone(call_id=1, rollouts=[]), at=3.0)
        assert await kept == []

    asyncio.run(scenario())


def test_a_pause_of_the_orchestrator_is_no_silence_of_the_node() -> None:
    async def scenario() -> None:
        wire = Wire()
        assert wire.node.check(now=14.0) == ""
        wire.node.restart_silence(now=100.0)
        assert wire.node.check(now=114.0) == ""
        assert "nothing was heard" in wire.node.check(now=116.0)

    asyncio.run(scenario())
