"""What both transports promise. Faults on the way are made by a relay between the two ends; intervals are milliseconds."""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

import numpy as np
import pytest
import zmq

from trivet.config.shared import TransportConfig
from trivet.errors import MessageRefused, WaitTimeout
from trivet.transport.inbox import MAX_HELD
from trivet.transport.memory import MemoryReceiver, MemorySender
from trivet.transport.zeromq import ZmqReceiver, ZmqSender
from trivet.wire.batches import Batch, BatchPurpose, MicroBatch

Frames = list[bytes]
Relay = Callable[[Frames, Callable[[Frames], bytes | None]], bytes | None]


def make_batch(step: int, *, num_tokens: int = 8, purpose: BatchPurpose = BatchPurpose.TRAIN) -> Batch:
    ids_T = np.arange(num_tokens, dtype=np.int32) + step
    row = MicroBatch(
        token_ids_T=ids_T,
        position_ids_T=np.arange(num_tokens, dtype=np.int32),
        loss_mask_T=ids_T % 2 == 0,
        logprobs_T=-ids_T.astype(np.float32),
        advantages_T=np.full(num_tokens, 0.5, dtype=np.float32),
        temperatures_T=np.ones(num_tokens, dtype=np.float32),
        sequence_lengths_S=np.array([num_tokens], dtype=np.int32),
        teacher_logprobs_T=-0.5 * ids_T.astype(np.float32),
    )
    return Batch(step=step, purpose=purpose, micro_batches=[row], group_ids=[step], num_rollouts=1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def make_config(**changes) -> TransportConfig:
    return TransportConfig(**{"port": free_port(), "resend_interval_s": 0.05, "timeout_s": 5.0, **changes})


class ZmqRelay:
    """Stands between a ZeroMQ sender and receiver and passes each message through `relay`."""

    def __init__(self, relay: Relay, *, target: int) -> None:
        self.port = free_port()
        self._relay = relay
        self._context = zmq.Context()
        self._front, self._back = self._context.socket(zmq.ROUTER), self._context.socket(zmq.DEALER)
        for end in (self._front, self._back):
            end.setsockopt(zmq.LINGER, 0)
        self._front.bind(f"tcp://127.0.0.1:{self.port}")
        self._back.connect(f"tcp://127.0.0.1:{target}")
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_closing.is_set():
            if self._front.poll(10):
                sender, *frames = self._front.recv_multipart()
                reply = self._relay(frames, self._pass_on)
                if reply is not None:
                    self._front.send_multipart([sender, reply])

    def _pass_on(self, frames: Frames) -> bytes | None:
        self._back.send_multipart(frames)
        return self._back.recv() if self._back.poll(200) else None

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join()
        self._context.destroy()


class Ends:
    """Makes the ends of one transport, and closes them."""

    def __init__(self, kind: str, stack: AsyncExitStack) -> None:
        self.kind = kind
        self._stack = stack

    def receiver(self, config, *, run_id="run", attempt=1):
        receiver = {"memory": MemoryReceiver, "zeromq": ZmqReceiver}[self.kind](config, run_id=run_id, attempt=attempt)
        self._stack.callback(receiver.close)
        return receiver

    def sender(self, config, receiver, *, run_id="run", attempt=1, relay: Relay | None = None):
        if self.kind == "memory":
            link = receiver.deliver if relay is None else lambda frames: relay(list(frames), receiver.deliver)
            sender = MemorySender(config, run_id=run_id, attempt=attempt, link=link)
        else:
            if relay is not None:
                between = ZmqRelay(relay, target=config.port)
                self._stack.callback(between.close)
                config = config.model_copy(update={"port": between.port})
            sender = ZmqSender(config, run_id=run_id, attempt=attempt)
        self._stack.push_async_callback(sender.aclose)
        return sender


@pytest.fixture(params=["memory", "zeromq"])
def run(request):
    """Runs a test body with the ends of each transport."""

    def run_body(body):
        async def main():
            async with AsyncExitStack() as stack:
                await body(Ends(request.param, stack))

        asyncio.run(main())

    return run_body


def assert_equal(found: Batch, sent: Batch) -> None:
    assert (found.step, found.purpose, found.group_ids) == (sent.step, sent.purpose, sent.group_ids)
    for found_row, sent_row in zip(found.micro_batches, sent.micro_batches, strict=True):
        for name in MicroBatch.__struct_fields__:
            np.testing.assert_array_equal(getattr(found_row, name), getattr(sent_row, name))
            assert getattr(found_row, name).dtype == getattr(sent_row, name).dtype


def test_batches_arrive_whole_and_in_order_after_the_self_check(run):
    async def body(ends: Ends):
        config = make_config()
        receiver = ends.receiver(config)
        sender = ends.sender(config, receiver)
        check = make_batch(0, purpose=BatchPurpose.SELF_CHECK)
        for batch in (check, make_batch(1), make_batch(2, num_tokens=100_000)):
            await sender.send(batch)
            assert_equal(receiver.receive(batch.step), batch)

    run(body)


def test_a_batch_is_acknowledged_before_the_trainer_asks_for_it(run):
    async def body(ends: Ends):
        config = make_config()
        receiver = ends.receiver(config)
        sender = ends.sender(config, receiver)
        for step in (1, 2):
            await sender.send(make_batch(step))
        assert [receiver.receive(step).step for step in (1, 2)] == [1, 2]

    run(body)


def test_the_trainer_may_wait_before_the_batch_is_sent(run):
    async def body(ends: Ends):
        config = make_config()
        receiver = ends.receiver(config)
        sender = ends.sender(config, receiver)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(receiver.receive, 1)
            await sender.send(make_batch(1))
            assert waiting.result(timeout=5).step == 1

    run(body)


def test_a_lost_message_is_sent_again(run):
    seen = []

    def lose_first(frames, pass_on):
        seen.append(len(frames))
        return None if len(seen) == 1 else pass_on(frames)

    async def body(ends: Ends):
        config = make_config()
        receiver = ends.receiver(config)
        await ends.sender(config, receiver, relay=lose_first).send(make_batch(1))
        assert receiver.receive(1).step == 1
        assert len(seen) == 2

    run(body)


def test_a_lost_acknowledgement_leads_to_one_delivery(run):
    replies = []

    def lose_first_reply(frames, pass_on):
        replies.append(pass_on(frames))
        return None if len(replies) == 1 else replies[-1]

    async def body(ends: Ends):
        config = make_config(timeout_s=0.3)
        receiver = ends.receiver(config)
        sender = ends.sender(make_config(port=config.port), receiver, relay=lose_first_reply)
        await sender.send(make_batch(1))
        assert len(replies) == 2
        assert receiver.receive(1).step == 1
        with pytest.raises(WaitTimeout):
            receiver.receive(1)

    run(body)


def test_a_duplicate_after_delivery_is_acknowledged_and_dropped(run):
    async def body(ends: Ends):
        config = make_config(timeout_s=0.3)
        receiver = ends.receiver(config)
        sender = ends.sender(config, receiver)
        batch = make_batch(1)
        for _ in range(3):
            await sender.send(batch)
        receiver.receive(1)
        await sender.send(batch)
        with pytest.raises(WaitTimeout):
            receiver.receive(1)

    run(body)


def test_a_delayed_acknowledgement_is_not_taken_for_the_next_batch(run):
    """The relay loses the message of batch 2 twice and answers with what it kept of batch 1."""
    kept, count = [], 0

    def answer_late(frames, pass_on):
        nonlocal count
        count += 1
        if count == 1:
            kept.append(pass_on(frames))
            return kept[0]
        return kept[0] if count <= 3 else pass_on(frames)

    async def body(ends: Ends):
        config = make_config()
        receiver = ends.receiver(config)
        sender = ends.sender(config, receiver, relay=answer_late)
        await sender.send(make_batch(1))
        await sender.send(make_batch(2))
        assert count == 4
        assert [receiver.receive(step).step for step in (1, 2)] == [1, 2]

    run(body)


def test_beyond_the_bound_nothing_is_acknowledged_until_the_trainer_takes_one(run):
    async def body(ends: Ends):
        config = make_config()
        receiver = ends.receiver(config)
        sender = ends.sender(config.model_copy(update={"timeout_s": 0.2}), receiver)
        for step in range(1, MAX_HELD + 1):
            await sender.send(make_batch(step))
        with pytest.raises(WaitTimeout):
            await sender.send(make_batch(MAX_HELD + 1))
        receiver.receive(1)
        await sender.send(make_batch(MAX_HELD + 1))
        assert receiver.receive(MAX_HELD + 1).step == MAX_HELD + 1

    run(body)


@pytest.mark.parametrize(
    ("identity", "reason"),
    [
        ({"run_id": "other"}, r"run 'other', the trainer is of run 'run'"),
        ({"attempt": 2}, "attempt 2, the trainer of attempt 1"),
    ],
)
def test_a_message_of_another_run_is_refused_and_the_trainer_goes_on(run, identity, reason, caplog):
    async def body(ends: Ends):
        config = make_config()
        receiver = ends.receiver(config)
        with pytest.raises(MessageRefused, match=reason):
            await ends.sender(config, receiver, **identity).send(make_batch(1, num_tokens=4))
        await ends.sender(config, receiver).send(make_batch(1))
        assert receiver.receive(1).num_tokens == 8

    with caplog.at_level(logging.WARNING):
        run(body)
    assert reason.split(",")[0] in caplog.text


def test_another_schema_is_refused_with_both_numbers(run, monkeypatch):
    async def body(ends: Ends):
        config = make_config()
        receiver = ends.receiver(config)
        sender = ends.sender(config, receiver)
        sender._key = type(sender._key)(run_id="run", attempt=1, schema=99)
        with pytest.raises(MessageRefused, match="schema 99, the trainer reads 1"):
            await sender.send(make_batch(1))

    run(body)


def test_a_batch_over_the_limit_is_not_sent(run):
    async def body(ends: Ends):
        config = make_config(max_message_mib=1)
        receiver = ends.receiver(config)
        with pytest.raises(
            MessageRefused, match=r"batch 1 has \d\.\d\d MiB, the limit is rollout_transport.max_message_mib = 1"
        ):
            await ends.sender(config, receiver).send(make_batch(1, num_tokens=100_000))

    run(body)


def test_a_batch_over_the_trainers_own_limit_is_refused(run):
    async def body(ends: Ends):
        config = make_config(max_message_mib=1)
        receiver = ends.receiver(config)
        sender = ends.sender(config.model_copy(update={"max_message_mib": 64}), receiver)
        with pytest.raises(MessageRefused, match=r"the trainer refused a message: batch 1 has .* MiB"):
            await sender.send(make_batch(1, num_tokens=100_000))

    run(body)


def test_a_damaged_payload_is_refused(run):
    def damage(frames, pass_on):
        payload = bytearray(frames[1])
        payload[-1] ^= 1
        return pass_on([frames[0], bytes(payload)])

    def shorten(frames, pass_on):
        return pass_on([frames[0], frames[1][:-1]])

    async def body(ends: Ends):
        for relay, reason in ((damage, "does not match the checksum"), (shorten, "its header says")):
            config = make_config()
            receiver = ends.receiver(config)
            with pytest.raises(MessageRefused, match=reason):
                await ends.sender(config, receiver, relay=relay).send(make_batch(1))

    run(body)


def test_another_batch_under_a_delivered_step_is_refused(run):
    async def body(ends: Ends):
        config = make_config()
        receiver = ends.receiver(config)
        sender = ends.sender(config, receiver)
        await sender.send(make_batch(1))
        with pytest.raises(MessageRefused, match="batch 1 was received before with other content"):
            await sender.send(make_batch(1, num_tokens=9))

    run(body)


def test_what_is_not_of_this_program_gets_no_answer(run):
    def replace(frames, pass_on):
        assert pass_on([b"GET / HTTP/1.1"]) is None
        assert pass_on([b"\x81\xa5magic\xa5other", frames[1]]) is None
        return pass_on(frames)

    async def body(ends: Ends):
        config = make_config(resend_interval_s=2.0)
        receiver = ends.receiver(config)
        await ends.sender(config, receiver, relay=replace).send(make_batch(1))
        assert receiver.receive(1).step == 1

    run(body)


def test_the_trainers_timeout_says_what_it_waited_for_and_what_came_last(run):
    async def body(ends: Ends):
        config = make_config(timeout_s=0.05)
        receiver = ends.receiver(config)
        with pytest.raises(
            WaitTimeout, match=r"waited 0.05 s for batch 1 .* nothing has arrived .* trainer\.rollout_transport"
        ):
            receiver.receive(1)
        patient = make_config(port=config.port)
        await ends.sender(patient, receiver).send(make_batch(1))
        with pytest.raises(MessageRefused):
            await ends.sender(patient, receiver, run_id="other").send(make_batch(2))
        with pytest.raises(WaitTimeout, match=r"last to arrive was batch 2, 0 s ago; refused last: batch 2 is of run 'other'"):
            receiver.receive(2)

    run(body)


def test_the_orchestrators_timeout_says_whom_it_waited_for(run):
    async def body(ends: Ends):
        config = make_config(timeout_s=0.1)
        receiver = ends.receiver(config)
        sender = ends.sender(config, receiver, relay=lambda frames, pass_on: None)
        with pytest.raises(WaitTimeout, match=r"waited 0.1 s for the trainer on 127.0.0.1:\d+ to acknowledge batch 7"):
            await sender.send(make_batch(7))

    run(body)


def test_a_batch_of_a_step_the_trainer_has_passed_makes_room(run, caplog):
    async def body(ends: Ends):
        config = make_config()
        receiver = ends.receiver(config)
        sender = ends.sender(config, receiver)
        await sender.send(make_batch(3))
        await sender.send(make_batch(4))
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(receiver.receive, 7)
            await sender.send(make_batch(7))
            assert waiting.result(timeout=5).step == 7

    run(body)
    assert "batch dropped step=3" in caplog.text


def test_closing_twice_is_allowed_and_nobody_waits_for_a_closed_receiver(run):
    async def body(ends: Ends):
        config = make_config()
        receiver = ends.receiver(config)
        sender = ends.sender(config, receiver)
        for _ in range(2):
            receiver.close()
            await sender.aclose()
        with pytest.raises(WaitTimeout, match="cannot receive batch 1: the receiver was closed"):
            receiver.receive(1)

    run(body)


def test_the_batch_the_trainer_waits_for_is_taken_even_when_later_ones_fill_the_bound(run):
    async def body(ends: Ends):
        config = make_config()
        receiver = ends.receiver(config)
        sender = ends.sender(config, receiver)
        for step in range(8, 8 + MAX_HELD):
            await sender.send(make_batch(step))
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(receiver.receive, 7)
            await sender.send(make_batch(7))
            assert waiting.result(timeout=5).step == 7
        assert receiver.receive(8).step == 8

    run(body)
