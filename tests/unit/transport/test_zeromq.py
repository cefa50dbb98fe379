"""Test what only a network has: ends that come and go, and ports that are in use."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from support.processes import find_free_port
from support.transport_ends import SECRET
from trivet.config.schema.shared import TransportConfig
from trivet.errors import ConfigError, WaitTimeout
from trivet.transport.zeromq import ZmqReceiver, ZmqSender
from trivet.wire.batches import Batch, BatchPurpose, MicroBatch


@pytest.fixture
def config():
    return TransportConfig(port=find_free_port(), resend_interval_s=0.05, timeout_s=10.0)


def make_batch(step):
    return Batch(step=step, purpose=BatchPurpose.TRAIN, micro_batches=[], group_ids=[], num_rollouts=0)


def test_the_trainer_may_start_after_the_batch_was_sent(config):
    async def main():
        sender = ZmqSender(config, secret=SECRET, run_id="run")
        sending = asyncio.create_task(sender.send(make_batch(1)), name="send")
        done, _ = await asyncio.wait([sending], timeout=3 * config.resend_interval_s)
        assert not done
        receiver = ZmqReceiver(config, secret=SECRET, run_id="run")
        await sending
        assert receiver.receive(1).step == 1
        receiver.close()
        await sender.aclose()

    asyncio.run(main())


def test_a_restarted_trainer_gets_the_next_batch_from_the_same_sender(config):
    async def main():
        sender = ZmqSender(config, secret=SECRET, run_id="run")
        for step in (1, 2, 3):
            receiver = ZmqReceiver(config, secret=SECRET, run_id="run")
            await sender.send(make_batch(step))
            assert receiver.receive(step).step == step
            receiver.close()
        await sender.aclose()

    asyncio.run(main())


def test_copies_for_an_absent_trainer_do_not_pile_up(config):
    """After twenty resends that nobody received, the trainer finds one copy, not twenty."""

    async def main():
        sender = ZmqSender(config.model_copy(update={"resend_interval_s": 0.01, "timeout_s": 0.2}), secret=SECRET, run_id="run")
        with pytest.raises(WaitTimeout):
            await sender.send(make_batch(1))
        receiver = ZmqReceiver(config.model_copy(update={"timeout_s": 0.3}), secret=SECRET, run_id="run")
        with pytest.raises(WaitTimeout, match="nothing has arrived"):
            receiver.receive(1)
        receiver.close()
        await sender.aclose()

    asyncio.run(main())


def test_a_cancelled_send_can_be_followed_by_another(config, monkeypatch):
    async def main():
        sender, receiver = ZmqSender(config, secret=SECRET, run_id="run"), ZmqReceiver(config, secret=SECRET, run_id="run")
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
        receiver.close()
        await sender.aclose()

    asyncio.run(main())


def test_a_taken_port_is_named_with_the_key_to_change(config):
    first = ZmqReceiver(config, secret=SECRET, run_id="run")
    with pytest.raises(ConfigError, match=rf"rollout_transport\.host = '127\.0\.0\.1', port = {config.port}: Address already"):
        ZmqReceiver(config, secret=SECRET, run_id="run")
    first.close()


def test_a_receiver_whose_thread_fails_wakes_the_trainer(config, monkeypatch, caplog):
    receiver = ZmqReceiver(config, secret=SECRET, run_id="run")

    def fail(frames):
        raise OSError("disk on fire")

    monkeypatch.setattr(receiver._inbox, "accept", fail)

    async def main():
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(receiver.receive, 1)
            sender = ZmqSender(config.model_copy(update={"timeout_s": 2.0}), secret=SECRET, run_id="run")
            with pytest.raises(WaitTimeout):
                await sender.send(make_batch(1))
            with pytest.raises(WaitTimeout, match="failed with OSError: disk on fire"):
                waiting.result(timeout=30)
            await sender.aclose()

    asyncio.run(main())
    receiver.close()
    assert "receiver failed" in caplog.text


def test_arrays_of_a_received_batch_stay_valid_after_the_receiver_is_closed(config):
    arrays = {name: np.arange(1000, dtype=np.int32) for name in MicroBatch.__struct_fields__}
    batch = Batch(step=1, purpose=BatchPurpose.TRAIN, micro_batches=[MicroBatch(**arrays)], group_ids=[], num_rollouts=0)

    async def main():
        sender, receiver = ZmqSender(config, secret=SECRET, run_id="run"), ZmqReceiver(config, secret=SECRET, run_id="run")
        await sender.send(batch)
        received = receiver.receive(1)
        receiver.close()
        await sender.aclose()
        return received

    received = asyncio.run(main())
    np.testing.assert_array_equal(received.micro_batches[0].token_ids_T, np.arange(1000))


def test_the_last_answer_is_read_although_the_trainer_ends_and_the_orchestrator_is_busy(config, monkeypatch):
    """Unread messages vanish when a connection ends, so the trainer's end waits for a message after its answer."""
    patient = config.model_copy(update={"resend_interval_s": 60.0, "timeout_s": 60.0})
    receiver = ZmqReceiver(patient, secret=SECRET, run_id="run")
    accept = receiver._inbox.accept

    async def main():
        loop = asyncio.get_running_loop()

        def accept_while_the_loop_is_busy(frames):
            if len(frames) == 2:
                loop.call_soon_threadsafe(time.sleep, 0.5)
                time.sleep(0.1)
            return accept(frames)

        def take_and_end():
            receiver.receive(1)
            receiver.close()

        monkeypatch.setattr(receiver._inbox, "accept", accept_while_the_loop_is_busy)
        sender = ZmqSender(patient, secret=SECRET, run_id="run")
        async with asyncio.timeout(30):
            await asyncio.gather(sender.send(make_batch(1)), asyncio.to_thread(take_and_end))
        await sender.aclose()

    asyncio.run(main())


def test_a_trainer_ends_although_nobody_reads_its_last_answer(config, monkeypatch):
    monkeypatch.setattr("trivet.transport.zeromq._LAST_ANSWER_S", 0.1)

    async def main():
        sender, receiver = ZmqSender(config, secret=SECRET, run_id="run"), ZmqReceiver(config, secret=SECRET, run_id="run")
        monkeypatch.setattr(sender, "_say", lambda acknowledged: asyncio.Event().wait())
        sending = asyncio.create_task(sender.send(make_batch(1)), name="send")
        assert (await asyncio.to_thread(receiver.receive, 1)).step == 1
        started = time.monotonic()
        async with asyncio.timeout(30):
            await asyncio.to_thread(receiver.close)
        assert time.monotonic() - started >= 0.1
        sending.cancel()
        await sender.aclose()

    asyncio.run(main())


def test_what_shows_elsewhere_that_the_trainer_has_a_batch_counts_like_its_answer(config):
    """A trainer that was killed after its last step answers nobody, and needs no answer."""

    async def main():
        has_arrived = asyncio.Event()
        sender = ZmqSender(
            config, secret=SECRET, run_id="run", has_arrived=lambda batch: batch.step == 1 and has_arrived.is_set()
        )
        sending = asyncio.create_task(sender.send(make_batch(1)), name="send")
        done, _ = await asyncio.wait([sending], timeout=3 * config.resend_interval_s)
        assert not done
        has_arrived.set()
        await sending
        sending = asyncio.create_task(sender.send(make_batch(2)), name="send")
        done, _ = await asyncio.wait([sending], timeout=3 * config.resend_interval_s)
        assert not done
        sending.cancel()
        await sender.aclose()

    asyncio.run(main())
