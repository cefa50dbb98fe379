"""A trainer waits for a batch only while the orchestrator reports that it is well."""

import asyncio
from itertools import pairwise

import pytest

from support.processes import find_free_port
from support.transport_ends import SECRET
from trivet.config.schema.shared import TransportConfig
from trivet.errors import WaitTimeout
from trivet.transport.messages import Inbox, RunKey, make_alive
from trivet.transport.zeromq import ZmqReceiver, ZmqSender
from trivet.wire.versions import Step

KEY = RunKey(run_id="run", attempt=2)


class Clock:
    """A clock that moves ten seconds with every look at it. `events` happen at their time."""

    def __init__(self, events):
        self.now, self.events = 0.0, dict(events)

    def __call__(self):
        self.now += 10.0
        for at in [at for at in self.events if at <= self.now]:
            self.events.pop(at)()
        return self.now


def waited(signs, *, key=KEY):
    """Return after how many seconds a wait of 100 s was given up, with signs of life of `key` at the given times."""
    config = TransportConfig(timeout_s=100)
    clock = Clock({})
    inbox = Inbox(config, key=KEY, clock=clock)
    inbox._changed.wait = lambda left: None
    frame = make_alive(key)
    clock.events = {at: lambda: inbox.accept([frame]) for at in signs}
    with pytest.raises(WaitTimeout, match="waited 100 s for batch 1"):
        inbox.take(Step(1))
    return clock.now


def test_without_a_sign_the_wait_ends_at_its_deadline():
    assert waited([]) < 150


def test_each_sign_starts_the_deadline_anew():
    assert 290 < waited([60, 120, 200]) < 350


def test_signs_of_another_attempt_or_run_do_not_count():
    assert waited([60, 120], key=RunKey(run_id="run", attempt=1)) < 150
    assert waited([60, 120], key=RunKey(run_id="other", attempt=2)) < 150


def test_who_waits_is_called_now_and_then_until_the_wait_is_over():
    calls, clock = [], Clock({})
    inbox = Inbox(TransportConfig(timeout_s=200), key=KEY, clock=clock, on_wait=lambda: calls.append(clock.now))
    inbox._changed.wait = lambda left: None
    with pytest.raises(WaitTimeout):
        inbox.take(Step(1))
    assert 3 <= len(calls) <= 7
    assert all(later - earlier >= 30 for earlier, later in pairwise(calls))


def test_a_sign_reaches_a_trainer_that_waits_and_none_is_owed_without_one():
    config = TransportConfig(port=find_free_port(), timeout_s=60)

    async def speak(receiver):
        sender = ZmqSender(config, secret=SECRET, run_id="run")
        try:
            if receiver is None:
                async with asyncio.timeout(5):
                    await sender.say_alive()
                return
            async with asyncio.timeout(20):
                while receiver._inbox._last_alive == float("-inf"):
                    await sender.say_alive()
                    await asyncio.sleep(0.01)
        finally:
            await sender.aclose()

    asyncio.run(speak(None))
    receiver = ZmqReceiver(config, secret=SECRET, run_id="run")
    try:
        asyncio.run(speak(receiver))
    finally:
        receiver.close()
