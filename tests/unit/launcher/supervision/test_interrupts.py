import os
import signal

import pytest

from trivet.launcher.supervision.interrupts import Interrupts


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_first_signal_is_kept_and_the_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts(clock=Clock()) as interrupts:
        assert interrupts.first is None
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.first == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(("later_s", "expected"), [(0.2, False), (1.5, True)])
def test_two_signals_at_once_are_one_that_came_twice(later_s: float, expected: bool) -> None:
    clock = Clock()
    with Interrupts(clock=clock) as interrupts:
        os.kill(os.getpid(), signal.SIGTERM)
        clock.now = later_s
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.is_repeated is expected


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts(clock=Clock()) as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            assert interrupts.first is None
    finally:
        signal.signal(signal.SIGHUP, before)
