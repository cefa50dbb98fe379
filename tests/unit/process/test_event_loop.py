import asyncio
import os
import signal

import pytest

from trivet.process.event_loop import LoopLag, lag_metrics, run_until_signalled


class Work:
    """Raises the given signals in turn: one while it works, one while it cleans up."""

    def __init__(self, number: signal.Signals | None, second: signal.Signals | None = None) -> None:
        self.number, self.second = number, second
        self.has_cleaned_up = False

    async def run(self) -> int:
        try:
            if self.number is not None:
                os.kill(os.getpid(), self.number)
                await asyncio.sleep(60)
        finally:
            if self.second is not None:
                os.kill(os.getpid(), self.second)
            for _ in range(3):  # a handler is called in a later turn of the loop
                await asyncio.sleep(0)
            self.has_cleaned_up = True
        return 1


@pytest.mark.parametrize(("number", "code"), [(None, 1), (signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_cancels_the_work_and_names_itself_in_the_exit_code(number: signal.Signals | None, code: int) -> None:
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


@pytest.mark.parametrize(
    ("raised", "left"),
    [
        (asyncio.CancelledError(), asyncio.CancelledError),
        (ExceptionGroup("tasks", [KeyError("first"), ValueError("second")]), KeyError),
    ],
)
def test_a_cancellation_without_a_signal_passes_and_of_a_group_of_errors_the_first_leaves(
    raised: BaseException, left: type[BaseException]
) -> None:
    async def work() -> int:
        raise raised

    with pytest.raises(left):
        asyncio.run(run_until_signalled(work()))


def test_lag_is_how_much_later_than_due_the_loop_came_back():
    async def scenario() -> LoopLag:
        now = 0.0
        late = iter([0.0, 0.25, 0.5])

        async def sleep(seconds: float) -> None:
            nonlocal now
            try:
                now += seconds + next(late)
            except StopIteration:
                raise asyncio.CancelledError from None

        lag = LoopLag(interval_s=0.125, clock=lambda: now, sleep=sleep)
        with pytest.raises(asyncio.CancelledError):
            await lag.run()
        return lag

    lag = asyncio.run(scenario())
    assert (lag.take(), lag.take()) == ([0.0, 0.25, 0.5], [])
    assert lag.last_turn == pytest.approx(3 * 0.125 + 0.75)


def test_the_numbers_asked_for_and_none_of_nothing():
    lags = [0.1 * index for index in range(10)]
    values = lag_metrics("lag", lags, ("min", "mean", "med", "p90", "max"))
    assert values == pytest.approx({"lag/min": 0.0, "lag/mean": 0.45, "lag/med": 0.5, "lag/p90": 0.9, "lag/max": 0.9})
    assert lag_metrics("lag", [], ("mean",)) == {}
