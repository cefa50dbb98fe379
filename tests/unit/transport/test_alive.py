"""A trainer waits for a batch only while the orchestrator reports that it is well."""

import asyncio
from itertools import pairwise

import pytest

from support.processes import find_free_port
from support.transport_ends import SECRET
from trivet.config.schema.shared import RunIdentity, TransportConfig
from trivet.errors import WaitTimeout
from trivet.transport.messages import Inbox
from trivet.transport.zeromq import ZmqReceiver, ZmqSender
from trivet.wire.batches import Alive
from trivet.wire.codec import encode
from trivet.wire.versions import PolicyVersion, Step, TransferRound

RUN = RunIdentity(id="run", attempt=2)
TRANSFER = TransferRound(version=PolicyVersion(3), digest="d", group_id="g", host="h", port=1, world_size=2, timeout_s=1.0)


class Clock:
    """A clock that moves ten seconds with every look at it. `events` happen at their time."""

    def __init__(self, events):
        self.now, self.events = 0.0, dict(events)

    def __call__(self):
        self.now += 10.0
        for at in [at for at in self.events if at <= self.now]:
            self.events.pop(at)()
        return self.now


def waited(signs, *, run=RUN):
    """Return after how many seconds a wait of 100 s was given up, with signs of life of `run` at the given times."""
    config = TransportConfig(timeout_s=100)
    clock = Clock({})
    inbox = Inbox(config, run=RUN, clock=clock)
    inbox._changed.wait = lambda left: None
    frame = encode(Alive(run_id=run.id, attempt=run.attempt))
    clock.events = {at: lambda: inbox.accept([frame]) for at in signs}
    with pytest.raises(WaitTimeout, match="waited 100 s for batch 1"):
        inbox.take(Step(1))
    return clock.now


@pytest.mark.parametrize(
    ("signs", "run", "earliest", "latest"),
    [
        ([], RUN, 100, 150),
        ([60, 120, 200], RUN, 290, 350),
        ([60, 120], RunIdentity(id="run", attempt=1), 100, 150),
        ([60, 120], RunIdentity(id="other", attempt=2), 100, 150),
    ],
    ids=["none", "each starts the deadline anew", "of another attempt", "of another run"],
)
def test_a_wait_ends_at_its_deadline_after_the_last_sign_of_the_run(signs, run, earliest, latest):
    assert earliest <= waited(signs, run=run) < latest


def test_a_waiting_trainer_is_called_now_and_then_until_the_wait_is_over():
    calls, clock = [], Clock({})
    inbox = Inbox(TransportConfig(timeout_s=200), run=RUN, clock=clock, on_wait=lambda: calls.append(clock.now))
    inbox._changed.wait = lambda left: None
    with pytest.raises(WaitTimeout):
        inbox.take(Step(1))
    assert 3 <= len(calls) <= 7
    assert all(later - earlier >= 30 for earlier, later in pairwise(calls))


def test_a_round_that_is_announced_reaches_the_trainer_of_the_same_run():
    found: list[TransferRound] = []
    inbox = Inbox(TransportConfig(), run=RUN, on_transfer=found.append)
    for attempt, announced in ((RUN.attempt, None), (RUN.attempt + 1, TRANSFER), (RUN.attempt, TRANSFER)):
        assert inbox.accept([encode(Alive(run_id=RUN.id, attempt=attempt, transfer=announced))]) is None
    assert found == [TRANSFER]


def test_a_sign_reaches_a_trainer_that_waits_and_is_left_out_without_one():
    config = TransportConfig(port=find_free_port(), timeout_s=60)
    announced: list[TransferRound] = []

    async def speak(receiver):
        sender = ZmqSender(config, secret=SECRET, run=RUN)
        try:
            if receiver is None:
                async with asyncio.timeout(5):
                    await sender.say_alive()
                return
            async with asyncio.timeout(20):
                while not announced:
                    await sender.say_alive(transfer=TRANSFER)
                    await asyncio.sleep(0.01)
        finally:
            await sender.aclose()

    asyncio.run(speak(None))
    receiver = ZmqReceiver(config, secret=SECRET, run=RUN, on_transfer=announced.append)
    try:
        asyncio.run(speak(receiver))
        assert receiver._inbox._last_alive > float("-inf")
    finally:
        receiver.close()
    assert announced[0] == TRANSFER
