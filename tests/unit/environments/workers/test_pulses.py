import asyncio
import math
import socket
from collections.abc import Awaitable, Callable

import pytest

from trivet.environments.workers.pulses import PulseMonitor
from trivet.wire.codec import encode
from trivet.wire.workers import Pulse


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def pulse_of(*, loop_age_s: float = 0.0, num_scoring: int = 0, scoring_for_s: float = 0.0, lags_s=()) -> Pulse:
    return Pulse(
        loop_age_s=loop_age_s, num_generating=4, num_scoring=num_scoring, scoring_for_s=scoring_for_s, lags_s=list(lags_s)
    )


def watch(scenario: Callable[[PulseMonitor, Clock, Callable[..., Awaitable[None]]], Awaitable[None]]) -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        clock, faults = Clock(), list[str]()
        monitor = PulseMonitor(ours, clock=clock, on_fault=faults.append)

        async def pulse(**values) -> None:
            theirs.send(encode(pulse_of(**values)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)

        with theirs:
            await scenario(monitor, clock, pulse)
        monitor.close()
        monitor.close()

    asyncio.run(run())


def test_a_worker_that_has_not_sent_a_pulse_is_not_blocked():
    async def scenario(monitor, clock, pulse) -> None:
        clock.now += 3600
        assert (monitor.blocked_for_s(), monitor.scoring_for_s(), monitor.num_generating) == (0.0, 0.0, 0)

    watch(scenario)


def test_a_worker_counts_as_blocked_after_three_seconds_of_silence():
    async def scenario(monitor, clock, pulse) -> None:
        await pulse(loop_age_s=0.5)
        clock.now += 3.0
        assert monitor.blocked_for_s() == 0.0
        clock.now += 1.0
        assert monitor.blocked_for_s() == 4.5
        await pulse()
        assert monitor.blocked_for_s() == 0.0

    watch(scenario)


def test_a_worker_whose_loop_does_not_turn_is_blocked_though_it_sends_pulses():
    async def scenario(monitor, clock, pulse) -> None:
        await pulse(loop_age_s=20.0)
        clock.now += 1.0
        assert monitor.blocked_for_s() == 21.0

    watch(scenario)


def test_a_pool_that_did_not_run_counts_the_silence_anew():
    async def scenario(monitor, clock, pulse) -> None:
        await pulse()
        clock.now += 600
        monitor.restart_silence()
        assert monitor.blocked_for_s() == 0.0

    watch(scenario)


def test_the_age_of_scoring_goes_on_between_pulses():
    async def scenario(monitor, clock, pulse) -> None:
        await pulse(num_scoring=2, scoring_for_s=7.0)
        clock.now += 2.0
        assert (monitor.num_generating, monitor.num_scoring, monitor.scoring_for_s()) == (4, 2, 9.0)
        await pulse()
        assert monitor.scoring_for_s() == 0.0

    watch(scenario)


def test_lags_of_several_pulses_are_taken_once():
    async def scenario(monitor, clock, pulse) -> None:
        await pulse(lags_s=[0.1])
        await pulse(lags_s=[0.2, 0.3])
        assert monitor.take_lags() == [0.1, 0.2, 0.3]
        assert monitor.take_lags() == []

    watch(scenario)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        pytest.param([b"no pulse"], "sent what is not a pulse", id="no pulse"),
        pytest.param([encode(pulse_of(loop_age_s=math.nan))], "sent a pulse whose times are no numbers", id="no number"),
        pytest.param([encode(pulse_of(lags_s=[math.inf]))], "sent a pulse whose times are no numbers", id="infinite lag"),
    ],
)
def test_a_worker_whose_pulses_cannot_be_true_is_reported_once(messages: list[bytes], said: str):
    async def scenario() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        faults: list[str] = []
        monitor = PulseMonitor(ours, clock=Clock(), on_fault=faults.append)
        with theirs:
            for message in messages:
                theirs.send(message)
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            assert [fault.partition(":")[0] for fault in faults] == [said]
        monitor.close()

    asyncio.run(scenario())


def test_a_worker_that_never_sends_a_pulse_counts_as_blocked_once_it_has_loaded():
    async def scenario() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        clock = Clock()
        monitor = PulseMonitor(ours, clock=clock, on_fault=print)
        clock.now += 500.0
        assert monitor.blocked_for_s() == 0.0
        monitor.expect()
        clock.now += 20.0
        assert monitor.blocked_for_s() == 20.0
        monitor.close()
        theirs.close()

    asyncio.run(scenario())
