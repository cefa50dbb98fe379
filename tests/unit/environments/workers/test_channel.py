"""Test the channel between pool and worker over a real socket pair."""

import asyncio
import socket

import msgspec
import numpy as np
import pytest

from support.groups import make_group
from trivet.environments.workers import channel as channel_module
from trivet.environments.workers.channel import Channel, pack_message, receive_blocking
from trivet.errors import MessageRefused
from trivet.wire.workers import Cancel, GroupDone, WorkerAnswer, WorkerOrder


async def open_both() -> tuple[Channel, Channel]:
    ours, theirs = socket.socketpair()
    return await Channel.open(ours), await Channel.open(theirs)


def test_messages_arrive_whole_and_in_order_whatever_their_size():
    async def scenario() -> None:
        pool, worker = await open_both()
        rollouts = make_group(7).rollouts
        rollouts[0].completion = [{"role": "assistant", "content": "x" * 10_000_000}]
        sending = asyncio.gather(
            worker.send(WorkerAnswer(body=GroupDone(call_id=3, group_id=7, rollouts=rollouts))),
            worker.send(WorkerAnswer(body=GroupDone(call_id=4, group_id=8, rollouts=[]))),
        )
        large, small = await pool.receive(WorkerAnswer), await pool.receive(WorkerAnswer)
        await sending
        assert small.body.rollouts == []
        assert len(large.body.rollouts[0].completion[0]["content"]) == 10_000_000
        sample = large.body.rollouts[1].samples[0]
        assert np.array_equal(sample.token_ids_T, rollouts[1].samples[0].token_ids_T)
        await pool.aclose()
        await worker.aclose()

    asyncio.run(scenario())


def test_the_end_of_one_side_is_seen_by_the_other_even_within_a_message():
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        pool = await Channel.open(ours)
        theirs.sendall(pack_message(WorkerOrder(body=Cancel(call_id=1)))[:-1])
        theirs.close()
        assert await pool.receive(WorkerOrder) is None
        await pool.aclose()
        await pool.aclose()
        pool.post(WorkerOrder(body=Cancel(call_id=1)))  # nobody hears it

    asyncio.run(scenario())


def test_a_message_can_be_received_before_there_is_an_event_loop():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(pack_message(WorkerOrder(body=Cancel(call_id=1))))
        assert receive_blocking(theirs, WorkerOrder) == WorkerOrder(body=Cancel(call_id=1))
        ours.close()
        assert receive_blocking(theirs, WorkerOrder) is None


def test_bytes_that_are_no_message_are_refused():
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        pool = await Channel.open(ours)
        with theirs:
            theirs.sendall(pack_message(WorkerAnswer(body=GroupDone(call_id=1, group_id=1, rollouts=[]))))
            with pytest.raises(MessageRefused):
                await pool.receive(WorkerOrder)
        await pool.aclose()

    asyncio.run(scenario())


def test_a_message_that_is_too_large_is_refused_before_it_is_sent(monkeypatch):
    monkeypatch.setattr(channel_module, "MAX_MESSAGE_BYTES", 100)
    with pytest.raises(MessageRefused, match="larger than what fits"):
        pack_message(msgspec.convert({"text": "x" * 200}, _Text))


class _Text(msgspec.Struct):
    text: str


def test_a_length_beyond_the_limit_is_refused_before_anything_is_read():
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        pool = await Channel.open(ours)
        theirs.sendall((2**62).to_bytes(8, "little"))
        theirs.close()
        with pytest.raises(MessageRefused, match="larger than what fits"):
            await pool.receive(WorkerOrder)
        await pool.aclose()

    asyncio.run(scenario())
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall((2**62).to_bytes(8, "little"))
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(MessageRefused, match="larger than what fits"):
            receive_blocking(ours, WorkerOrder)
