"""An event loop whose time passes only while every task waits. Hours of waits take no time, in the same order each time."""

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.SelectSelector):
    """A selector that jumps to the next timer instead of sleeping."""

    advance: Callable[[float], None]

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events:
            if timeout is None:
                raise RuntimeError("everybody waits, and nobody for a time: a deadlock")
            self.advance(timeout)
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop that runs calls for a thread at once, because no thread advances while time stands still."""

    def __init__(self) -> None:
        selector = _Selector()
        selector.advance = self._advance
        self._now = 0.0
        super().__init__(selector)

    def time(self) -> float:
        return self._now

    def _advance(self, seconds: float) -> None:
        self._now += seconds

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> "asyncio.Future[T]":  # type: ignore[override]  # not awaited in between
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as exc:  # noqa: BLE001  it belongs to whoever waits for the future
            future.set_exception(exc)
        return future


def run_virtually(main: Coroutine[Any, Any, T], *, limit_s: float) -> T:
    """Run `main`. Raise TimeoutError when it takes longer than `limit_s` of virtual time."""

    async def limited() -> T:
        async with asyncio.timeout(limit_s):
            return await main

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(limited())


def virtually(play: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a test of a coroutine function, which runs in virtual time and may take an hour of it."""

    @functools.wraps(play)
    def test(**fixtures: Any) -> None:
        run_virtually(play(**fixtures), limit_s=3600)

    return test
