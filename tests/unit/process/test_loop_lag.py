import asyncio

import pytest

from trivet.process.loop_lag import LoopLag, lag_metrics


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
    assert lag.take() == [0.0, 0.25, 0.5]
    assert lag.take() == []
    assert lag.last_turn == pytest.approx(3 * 0.125 + 0.75)


def test_the_numbers_asked_for_and_none_of_nothing():
    lags = [0.1 * index for index in range(10)]
    values = lag_metrics("lag", lags, ("min", "mean", "med", "p90", "max"))
    assert values == pytest.approx({"lag/min": 0.0, "lag/mean": 0.45, "lag/med": 0.5, "lag/p90": 0.9, "lag/max": 0.9})
    assert lag_metrics("lag", [], ("mean",)) == {}
