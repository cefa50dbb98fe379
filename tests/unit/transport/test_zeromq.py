"""Test the promises of the transport: with faults between the ends, ends that come and go, and ports that are in use."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from support.transport_ends import RUN, SECRET, Ends, assert_equal, make_batch, make_config, with_ends
from trivet.config.schema.shared import RunIdentity
from trivet.errors import ConfigError, MessageRefused, WaitTimeout
from trivet.transport.messages import MAX_HELD
from trivet.transport.zeromq import ZmqReceiver
from trivet.wire.batches import BatchPurpose, MicroBatch


@with_ends
async def test_batches_arrive_whole_and_in_order_after_the_self_check(ends: Ends):
    receiver, sender = ends.pair()
    check = make_batch(0, purpose=BatchPurpose.PROBE)
    for batch in (check, make_batch(1), make_batch(2, num_tokens=100_000)):
        await sender.send(batch)
        assert_equal(receiver.receive(batch.step), batch)


@with_ends
async def test_a_lost_message_is_sent_again(ends: Ends):
    seen = []

    def lose_first(frames, pass_on):
        seen.append(len(frames))
        return None if len(seen) == 1 else pass_on(frames)

    receiver, sender = ends.pair(relay=lose_first)
    await sender.send(make_batch(1))
    assert receiver.receive(1).step == 1
    assert len(seen) >= 2  # more where the answer was late


@with_ends
async def test_a_lost_acknowledgement_leads_to_one_delivery(ends: Ends):
    replies = []

    def lose_first_reply(frames, pass_on):
        replies.append(pass_on(frames))
        return None if len(replies) == 1 else replies[-1]

    config = make_config(timeout_s=0.3)
    receiver = ends.receiver(config)
    await ends.sender(make_config(port=config.port), relay=lose_first_reply).send(make_batch(1))
    assert len(replies) >= 2
    assert receiver.receive(1).step == 1
    with pytest.raises(WaitTimeout):
        receiver.receive(1)


@with_ends
async def test_a_delayed_acknowledgement_is_not_taken_for_the_next_batch(ends: Ends):
    """The relay loses the message of batch 2 twice and answers with its copy of batch 1's answer."""
    kept, count = [], 0

    def answer_late(frames, pass_on):
        nonlocal count
        count += 1
        if count == 1:
            kept.append(pass_on(frames))
            return kept[0]
        return kept[0] if count <= 3 else pass_on(frames)

    receiver, sender = ends.pair(relay=answer_late)
    await sender.send(make_batch(1))
    await sender.send(make_batch(2))
    assert count >= 4
    assert [receiver.receive(step).step for step in (1, 2)] == [1, 2]


@with_ends
async def test_beyond_the_bound_nothing_is_acknowledged_until_the_trainer_takes_one(ends: Ends):
    config = make_config()
    receiver, sender = ends.pair(config)
    for step in range(1, MAX_HELD + 1):
        await sender.send(make_batch(step))
    with pytest.raises(WaitTimeout):
        await ends.sender(config.model_copy(update={"timeout_s": 0.2})).send(make_batch(MAX_HELD + 1))
    receiver.receive(1)
    await sender.send(make_batch(MAX_HELD + 1))
    assert receiver.receive(MAX_HELD + 1).step == MAX_HELD + 1


@pytest.mark.parametrize(("held", "reason"), [((3, 4), "batch dropped step=3"), ((8, 9), "")], ids=["earlier", "later"])
@with_ends
async def test_the_batch_that_the_trainer_waits_for_is_taken_although_others_fill_the_bound(ends: Ends, held, reason, caplog):
    receiver, sender = ends.pair()
    for step in held:
        await sender.send(make_batch(step))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(receiver.receive, 7)
        await sender.send(make_batch(7))
        assert waiting.result(timeout=30).step == 7
    assert reason in caplog.text


@pytest.mark.parametrize(
    ("identity", "reason"),
    [
        (RunIdentity(id="other"), "run 'other', the trainer is of run 'run'"),
        (RunIdentity(id="run", attempt=2), "attempt 2, the trainer of attempt 1"),
    ],
)
@with_ends
async def test_a_message_of_another_run_is_refused_and_the_trainer_goes_on(ends: Ends, identity, reason, caplog):
    config = make_config()
    receiver, sender = ends.pair(config)
    with pytest.raises(MessageRefused, match=reason):
        await ends.sender(config, run=identity).send(make_batch(1, num_tokens=4))
    await sender.send(make_batch(1))
    assert receiver.receive(1).num_tokens == 8
    assert reason in caplog.text


@with_ends
async def test_another_schema_is_refused_with_both_numbers(ends: Ends, monkeypatch):
    _, sender = ends.pair()
    message = sender._exchange

    async def send_another_schema(made, *, until):
        monkeypatch.setattr("trivet.transport.messages.SCHEMA_VERSION", 2)
        return await message(made, until=until)

    monkeypatch.setattr(sender, "_exchange", send_another_schema)
    with pytest.raises(MessageRefused, match="schema 1, the trainer reads 2"):
        await sender.send(make_batch(1))


@pytest.mark.parametrize("is_over_limit", [{"sender": 1, "receiver": 64}, {"sender": 64, "receiver": 1}])
@with_ends
async def test_a_batch_over_the_limit_of_either_side_is_refused(ends: Ends, is_over_limit):
    config = make_config(max_message_mib=is_over_limit["receiver"])
    ends.receiver(config)
    sender = ends.sender(config.model_copy(update={"max_message_mib": is_over_limit["sender"]}))
    with pytest.raises(MessageRefused, match=r"batch 1 has \d\.\d\d MiB, the limit is rollout_transport.max_message_mib = 1"):
        await sender.send(make_batch(1, num_tokens=100_000))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda payload: payload[:-1] + bytes([payload[-1] ^ 1]), "does not match the checksum"),
        (lambda payload: payload[:-1], "its header says"),
    ],
)
@with_ends
async def test_a_damaged_payload_is_refused(ends: Ends, damage, reason):
    _, sender = ends.pair(relay=lambda frames, pass_on: pass_on([frames[0], damage(frames[1])]))
    with pytest.raises(MessageRefused, match=reason):
        await sender.send(make_batch(1))


@with_ends
async def test_a_batch_is_delivered_once_and_another_one_of_its_step_is_refused(ends: Ends):
    receiver, sender = ends.pair(make_config(timeout_s=0.5))
    for _ in range(3):
        await sender.send(make_batch(1))
    receiver.receive(1)
    await sender.send(make_batch(1))
    with pytest.raises(WaitTimeout):
        receiver.receive(1)
    with pytest.raises(MessageRefused, match="batch 1 was received before with other content"):
        await sender.send(make_batch(1, num_tokens=9))


@with_ends
async def test_what_is_not_of_this_program_gets_no_answer(ends: Ends):
    def replace(frames, pass_on):
        assert pass_on([b"GET / HTTP/1.1"]) is None
        assert pass_on([b"\x81\xa5magic\xa5other", frames[1]]) is None
        return pass_on(frames)

    receiver, sender = ends.pair(make_config(resend_interval_s=2.0), relay=replace)
    await sender.send(make_batch(1))
    assert receiver.receive(1).step == 1


@with_ends
async def test_a_timeout_says_who_waited_for_what_and_what_came_last(ends: Ends):
    config = make_config(timeout_s=0.05)
    receiver = ends.receiver(config)
    with pytest.raises(WaitTimeout, match=r"waited 0.05 s for batch 1 .* nothing has arrived .* trainer\.rollout_transport"):
        receiver.receive(1)
    patient = make_config(port=config.port)
    await ends.sender(patient).send(make_batch(1))
    with pytest.raises(MessageRefused):
        await ends.sender(patient, run=RunIdentity(id="other")).send(make_batch(2))
    with pytest.raises(WaitTimeout, match=r"last to arrive was batch 2, \d+ s ago; refused last: batch 2 is of run 'other'"):
        receiver.receive(2)
    hasty = ends.sender(patient.model_copy(update={"timeout_s": 0.1}), relay=lambda frames, pass_on: None)
    with pytest.raises(WaitTimeout, match=r"waited 0.1 s for the trainer on 127.0.0.1:\d+ to acknowledge batch 7"):
        await hasty.send(make_batch(7))


@with_ends
async def test_closing_twice_is_allowed_and_nobody_waits_for_a_closed_receiver(ends: Ends):
    receiver, sender = ends.pair()
    for _ in range(2):
        receiver.close()
        await sender.aclose()
    with pytest.raises(WaitTimeout, match="cannot receive batch 1: the receiver was closed"):
        receiver.receive(1)


@with_ends
async def test_the_trainer_may_start_after_the_batch_was_sent_and_start_again(ends: Ends):
    config = make_config()
    sender = ends.sender(config)
    sending = asyncio.create_task(sender.send(make_batch(1)), name="send")
    done, _ = await asyncio.wait([sending], timeout=3 * config.resend_interval_s)
    assert not done
    for step in (1, 2, 3):
        receiver = ends.receiver(config)
        await (sending if step == 1 else sender.send(make_batch(step)))
        assert receiver.receive(step).step == step
        receiver.close()


@with_ends
async def test_copies_for_an_absent_trainer_do_not_pile_up(ends: Ends):
    """After twenty resends that nobody received, the trainer finds one copy, not twenty."""

    config = make_config(resend_interval_s=0.01, timeout_s=0.2)
    with pytest.raises(WaitTimeout):
        await ends.sender(config).send(make_batch(1))
    with pytest.raises(WaitTimeout, match="nothing has arrived"):
        ends.receiver(config).receive(1)


@with_ends
async def test_a_cancelled_send_can_be_followed_by_another(ends: Ends, monkeypatch):
    receiver, sender = ends.pair()
    has_come = threading.Event()
    with monkeypatch.context() as silent:  # an answer may come at once, and then there would be nothing to cancel
        silent.setattr(receiver._inbox, "accept", lambda frames: has_come.set())
        sending = asyncio.create_task(sender.send(make_batch(1)), name="send")
        assert await asyncio.to_thread(has_come.wait, 10)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
    await sender.send(make_batch(1))
    assert receiver.receive(1).step == 1


@with_ends
async def test_a_taken_port_is_named_with_the_key_to_change(ends: Ends):
    config = make_config()
    ends.receiver(config)
    message = rf"rollout_transport\.host = '127\.0\.0\.1', port = {config.port}: Address already"
    with pytest.raises(ConfigError, match=message):
        ZmqReceiver(config, secret=SECRET, run=RUN)


@with_ends
async def test_a_receiver_whose_thread_fails_wakes_the_trainer(ends: Ends, monkeypatch, caplog):
    def fail(frames):
        raise OSError("disk on fire")

    config = make_config()
    receiver = ends.receiver(config)
    monkeypatch.setattr(receiver._inbox, "accept", fail)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(receiver.receive, 1)
        with pytest.raises(WaitTimeout):
            await ends.sender(config.model_copy(update={"timeout_s": 1.0})).send(make_batch(1))
        with pytest.raises(WaitTimeout, match="failed with OSError: disk on fire"):
            waiting.result(timeout=30)
    assert "receiver failed" in caplog.text


@with_ends
async def test_arrays_of_a_received_batch_stay_valid_after_the_receiver_is_closed(ends: Ends):
    receiver, sender = ends.pair()
    sent = make_batch(1, num_tokens=1000)
    await sender.send(sent)
    received = receiver.receive(1)
    receiver.close()
    await sender.aclose()
    for name in MicroBatch.__struct_fields__:
        np.testing.assert_array_equal(getattr(received.micro_batches[0], name), getattr(sent.micro_batches[0], name))


@with_ends
async def test_the_last_answer_is_read_although_the_trainer_ends_and_the_orchestrator_is_busy(ends: Ends, monkeypatch):
    """Unread messages vanish when a connection ends, so the trainer's end waits for a message after its answer."""

    receiver, sender = ends.pair(make_config(resend_interval_s=60.0, timeout_s=60.0))
    accept, loop = receiver._inbox.accept, asyncio.get_running_loop()

    def accept_while_the_loop_is_busy(frames):
        if len(frames) == 2:
            loop.call_soon_threadsafe(time.sleep, 0.5)
            time.sleep(0.1)
        return accept(frames)

    def take_and_end():
        receiver.receive(1)
        receiver.close()

    monkeypatch.setattr(receiver._inbox, "accept", accept_while_the_loop_is_busy)
    async with asyncio.timeout(30):
        await asyncio.gather(sender.send(make_batch(1)), asyncio.to_thread(take_and_end))


@with_ends
async def test_a_trainer_ends_although_nobody_reads_its_last_answer(ends: Ends, monkeypatch):
    monkeypatch.setattr("trivet.transport.zeromq._LAST_ANSWER_S", 0.1)

    receiver, sender = ends.pair()
    monkeypatch.setattr(sender, "say_alive", lambda acknowledged: asyncio.Event().wait())
    sending = asyncio.create_task(sender.send(make_batch(1)), name="send")
    assert (await asyncio.to_thread(receiver.receive, 1)).step == 1
    started = time.monotonic()
    async with asyncio.timeout(30):
        await asyncio.to_thread(receiver.close)
    assert time.monotonic() - started >= 0.1
    sending.cancel()


@with_ends
async def test_what_shows_elsewhere_that_the_trainer_has_a_batch_counts_like_its_answer(ends: Ends):
    """A trainer that was killed after its last step answers nobody, and needs no answer."""

    has_arrived = asyncio.Event()
    sender = ends.sender(make_config(), has_arrived=lambda batch: batch.step == 1 and has_arrived.is_set())
    for step in (1, 2):
        sending = asyncio.create_task(sender.send(make_batch(step)), name="send")
        done, _ = await asyncio.wait([sending], timeout=0.2)
        assert not done
        has_arrived.set()
        if step == 1:
            await sending
    sending.cancel()
