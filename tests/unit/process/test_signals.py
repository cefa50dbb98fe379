import asyncio
import os
import signal

import pytest

from trivet.process.signals import Interrupts, run_until_signalled


class Work:
    """Raises the given signals in turn: one while it works, one while it cleans up."""

    def __init__(self, number: signal.Signals, second: signal.Signals | None = None) -> None:
        self.number, self.second = number, second
        self.has_cleaned_up = False

    async def run(self) -> int:
        try:
            os.kill(os.getpid(), self.number)
            await asyncio.sleep(60)
        finally:
            if self.second is not None:
                os.kill(os.getpid(), self.second)
            for _ in range(3):  # a handler is called in a later turn of the loop
                await asyncio.sleep(0)
            self.has_cleaned_up = True
        return 0


def test_without_a_signal_the_exit_code_is_that_of_the_work() -> None:
    async def work() -> int:
        return 1

    assert asyncio.run(run_until_signalled(work())) == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_cancels_the_work_and_names_itself_in_the_exit_code(number: signal.Signals, code: int) -> None:
    work = Work(number)
    assert asyncio.run(run_until_signalled(work.run())) == code
    assert work.has_cleaned_up


@pytest.mark.parametrize("is_cleanup_protected", [False, True])
def test_a_second_signal_interrupts_the_cleanup_unless_it_is_protected(is_cleanup_protected: bool) -> None:
    work = Work(signal.SIGTERM, second=signal.SIGINT)
    code = asyncio.run(run_until_signalled(work.run(), is_cleanup_protected=is_cleanup_protected))
    assert code == 143
    assert work.has_cleaned_up is is_cleanup_protected


@pytest.mark.parametrize(("is_dealt_with", "code"), [(True, 143), (False, 138)])
def test_a_further_signal_cancels_only_what_its_handler_did_not_deal_with(is_dealt_with: bool, code: int) -> None:
    def handler() -> bool:
        if is_dealt_with:
            os.kill(os.getpid(), signal.SIGTERM)
        return is_dealt_with

    work = Work(signal.SIGUSR1)
    assert asyncio.run(run_until_signalled(work.run(), handlers={signal.SIGUSR1: handler})) == code


def test_a_cancellation_without_a_signal_passes() -> None:
    async def work() -> int:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run_until_signalled(work()))


def test_of_a_group_of_errors_the_first_leaves() -> None:
    async def work() -> int:
        raise ExceptionGroup("tasks", [KeyError("first"), ValueError("second")])

    with pytest.raises(KeyError, match="first"):
        asyncio.run(run_until_signalled(work()))


def test_a_signal_that_the_starter_has_this_process_ignore_stays_ignored() -> None:
    """`nohup` starts a program so, which must outlive its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:

        async def work() -> int:
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.01)
            return 0

        assert asyncio.run(run_until_signalled(work())) == 0
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            assert interrupts.first is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_first_signal_is_kept_and_passed_on_and_the_handlers_are_put_back() -> None:
    before, sent = signal.getsignal(signal.SIGTERM), list[int]()
    with Interrupts(without={signal.SIGINT}) as interrupts:
        assert signal.getsignal(signal.SIGINT) is not interrupts._note
        assert interrupts.forward(sent.append, 0) == 0
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)
        assert interrupts.first == signal.SIGTERM
        assert interrupts.forward(sent.append, interrupts.forward(sent.append, 0)) == 1
    assert signal.getsignal(signal.SIGTERM) is before
    assert sent == [signal.SIGTERM]


@pytest.mark.parametrize(("later_s", "expected"), [(0.2, False), (1.5, True)])
def test_two_signals_at_once_are_one_that_came_twice(later_s: float, expected: bool) -> None:
    now = [0.0]
    with Interrupts(clock=lambda: now[0]) as interrupts:
        os.kill(os.getpid(), signal.SIGTERM)
        now[0] = later_s
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.is_repeated is expected
