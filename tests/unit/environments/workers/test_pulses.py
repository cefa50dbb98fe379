import asyncio
import socket
from collections.abc import Awaitable, Callable

from trivet.environments.workers.pulses import PulseMonitor
from trivet.wire.codec import encode
from trivet.wire.workers import Pulse


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def watch(scenario: Callable[[PulseMonitor, Clock, Callable[..., Awaitable[None]]], Awaitable[None]]) -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        clock = Clock()
        monitor = PulseMonitor(ours, clock=clock)

        async def pulse(*, loop_age_s: float = 0.0, num_scoring: int = 0, scoring_for_s: float = 0.0, lags_s=()) -> None:
            theirs.send(
                encode(
                    Pulse(
                        loop_age_s=loop_age_s,
                        num_generating=4,
                        num_scoring=num_scoring,
                        scoring_for_s=scoring_for_s,
                        lags_s=list(lags_s),
                    )
                )
            )
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
