"""Test the channel between pool and worker over a real socket pair."""

import asyncio
import socket

import numpy as np
import pytest

from support.groups import make_group
from trivet.environments.workers import channel as channel_module
from trivet.environments.workers.channel import Channel, pack_message
from trivet.errors import MessageRefused
from trivet.wire.rollouts import Rollout
from trivet.wire.workers import Cancel, GroupDone, WorkerAnswer, WorkerOrder

CANCEL = WorkerOrder(body=Cancel(call_id=1))


def test_messages_arrive_whole_and_in_order_whatever_their_size():
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        pool, worker = await Channel.open(ours), await Channel.open(theirs)
        rollouts = make_group(7).rollouts
        rollouts[0].completion = [{"role": "assistant", "content": "x" * 10_000_000}]
        worker.post(WorkerAnswer(body=GroupDone(call_id=3, rollouts=rollouts)))
        worker.post(WorkerAnswer(body=GroupDone(call_id=4, rollouts=[])))
        large, small = await pool.receive(WorkerAnswer), await pool.receive(WorkerAnswer)
        assert small.body.rollouts == []
        assert len(large.body.rollouts[0].completion[0]["content"]) == 10_000_000
        sample = large.body.rollouts[1].samples[0]
        assert np.array_equal(sample.token_ids_T, rollouts[1].samples[0].token_ids_T)
        await pool.aclose()
        await worker.aclose()

    asyncio.run(scenario())


def receive(data: bytes) -> object:
    """Return what is received of `data` and an end."""

    async def wait(sock: socket.socket) -> object:
        channel = await Channel.open(sock)
        try:
            return await channel.receive(WorkerOrder)
        finally:
            await channel.aclose()
            await channel.aclose()
            channel.post(CANCEL)  # nobody hears it

    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        return asyncio.run(wait(ours))


@pytest.mark.parametrize(
    ("data", "found"),
    [(pack_message(CANCEL), CANCEL), (b"", None), (pack_message(CANCEL)[:-1], None)],
    ids=["whole", "no message", "within a message"],
)
def test_a_whole_message_or_the_end_of_the_other_side_is_received(data: bytes, found: object):
    assert receive(data) == found


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (pack_message(WorkerAnswer(body=GroupDone(call_id=1, rollouts=[]))), "are not a WorkerOrder"),
        ((2**62).to_bytes(8, "little"), "larger than what fits"),
    ],
)
def test_bytes_that_are_no_message_are_refused(data: bytes, problem: str):
    with pytest.raises(MessageRefused, match=problem):
        receive(data)


def test_a_message_that_is_too_large_is_refused_before_it_is_sent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(channel_module, "MAX_MESSAGE_BYTES", 1)
    with pytest.raises(MessageRefused, match="larger than what fits"):
        pack_message(CANCEL)


@pytest.mark.parametrize("content", ["\ud800", 2**70, object()])
def test_what_cannot_be_encoded_is_refused_and_ends_no_worker(content: object) -> None:
    rollout = Rollout(index=0, reward=1.0, completion=[{"role": "user", "content": content}])
    with pytest.raises(MessageRefused, match="cannot be encoded"):
        pack_message(WorkerAnswer(body=GroupDone(call_id=1, rollouts=[rollout])))
