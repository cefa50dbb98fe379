"""Ends an asyncio program when a signal comes, in an orderly way. Roles and commands run their main coroutine through it.

The launcher, which is no asyncio program, polls its signals by `launcher.supervision.interrupts`.
"""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from trivet.errors import first_error

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def ending_signals() -> list[signal.Signals]:
    """Return the signals that ask this process to end: Ctrl-C, SIGTERM, and SIGHUP of a closed terminal.

    One that its starter has it ignore, as nohup does with SIGHUP, is not among them.
    """
    return [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Yield the list of the SIGTERM and SIGHUP that came during the block, which ends when it suits it. Ctrl-C ends it at once."""
    received: list[int] = []
    numbers = [number for number in ending_signals() if number != signal.SIGINT]
    before = {number: signal.signal(number, lambda came, _: received.append(came)) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def run_until_signalled(
    work: Coroutine[Any, Any, int],
    *,
    handlers: Mapping[signal.Signals, Callable[[], bool]] = MappingProxyType({}),
    is_cleanup_protected: bool = False,
) -> int:
    """Await `work` in this task and cancel it when one of the `ending_signals` comes.

    Args:
        handlers: further signals, each with a function that returns whether it dealt with the signal; if not, `work` is cancelled.
        is_cleanup_protected: a second signal does not cancel what `work` does after the first.

    Returns:
        What `work` returns; 128 + N when signal N cancelled it.

    Raises:
        BaseException: `first_error` of an exception group that leaves `work`.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    received: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        received.append(number)
        if len(received) == 1 or not is_cleanup_protected:
            task.cancel()

    def handle(number: signal.Signals) -> None:
        if not handlers[number]():
            stop(number)

    for number in ending_signals():
        loop.add_signal_handler(number, stop, number)
    for number in handlers:
        loop.add_signal_handler(number, handle, number)
    try:
        return await work
    except asyncio.CancelledError:
        if not received:
            raise
        return 128 + received[0]
    except BaseExceptionGroup as group:
        raise first_error(group) from group
