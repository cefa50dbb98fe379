"""Test the promises of both transports, with faults between the ends."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

import pytest

from support.transport_ends import Ends, assert_equal, make_batch, make_config
from trivet.errors import MessageRefused, WaitTimeout
from trivet.transport.messages import MAX_HELD
from trivet.wire.batches import BatchPurpose


@pytest.fixture(params=["memory", "zeromq"])
def run(request):
    """Run a test body with the ends of each transport."""

    def run_body(body):
        async def main():
            async with AsyncExitStack() as stack:
                await body(Ends(request.param, stack))

        asyncio.run(main())

    return run_body


def test_batches_arrive_whole_and_in_order_after_the_self_check(run):
    async def body(ends: Ends):
        config = make_config()
        receiver = ends.receiver(config)
        sender = ends.sender(config, receiver)
        check = make_batch(0, purpose=BatchPurpose.PROBE)
        for batch in (check, make_batch(1), make_batch(2, num_tokens=100_000)):
            await sender.send(batch)
            assert_equal(receiver.receive(batch.step), batch)

    run(body)


def test_the_trainer_may_wait_before_the_batch_is_sent(run):
    async def body(ends: Ends):
        config = make_config()
        receiver = ends.receiver(config)
        sender = ends.sender(config, receiver)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(receiver.receive, 1)
            await sender.send(make_batch(1))
            assert waiting.result(timeout=30).step == 1

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
        assert len(seen) >= 2  # more where the answer was late

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
        assert len(replies) >= 2
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
    """The relay loses the message of batch 2 twice and answers with its copy of batch 1's answer."""
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
        assert count >= 4
        assert [receiver.receive(step).step for step in (1, 2)] == [1, 2]

    run(body)


def test_beyond_the_bound_nothing_is_acknowledged_until_the_trainer_takes_one(run):
    async def body(ends: Ends):
        config = make_config()
        receiver = ends.receiver(config)
        sender = ends.sender(config, receiver)
        impatient = ends.sender(config.model_copy(update={"timeout_s": 0.2}), receiver)
        for step in range(1, MAX_HELD + 1):
            await sender.send(make_batch(step))
        with pytest.raises(WaitTimeout):
            await impatient.send(make_batch(MAX_HELD + 1))
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
        with pytest.raises(
            WaitTimeout, match=r"last to arrive was batch 2, \d+ s ago; refused last: batch 2 is of run 'other'"
        ):
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
            assert waiting.result(timeout=30).step == 7

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
            assert waiting.result(timeout=30).step == 7
        assert receiver.receive(8).step == 8

    run(body)
