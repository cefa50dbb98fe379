"""Ends a process in order when a signal asks for it: an asyncio program is cancelled, any other polls the signals that came."""

import signal
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from types import FrameType, MappingProxyType, TracebackType
from typing import Any

from trivet.errors import first_error

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_REPEATED_S = 1.0
"""One Ctrl-C may arrive twice, from the terminal and from `uv run`; a signal after this long is a second one."""


def ending_signals() -> list[signal.Signals]:
    """Return the signals that ask this process to end: Ctrl-C, SIGTERM, and SIGHUP of a closed terminal.

    One that its starter has it ignore, as nohup does with SIGHUP, is not among them.
    """
    return [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]


class Interrupts:
    """Keeps the signals that come during the block, so that a program can poll them."""

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, without: Collection[signal.Signals] = frozenset()
    ) -> None:
        """Keep nothing yet.

        Args:
            without: signals that keep their effect. So does one that was ignored before (nohup).
        """
        self._clock = clock
        self._without = without
        self._received: list[tuple[int, float]] = []
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def first(self) -> int | None:
        """Number of the first signal, None when none came."""
        return self._received[0][0] if self._received else None

    @property
    def is_repeated(self) -> bool:
        """True when a second signal came: its sender does not want to wait for what the first began."""
        return bool(self._received) and self.has_any_since(self._received[0][1] + _REPEATED_S)

    def has_any_since(self, moment: float) -> bool:
        """Return whether a signal came after `moment`, in seconds of the clock."""
        return any(time > moment for _, time in self._received)

    def forward(self, send: Callable[[int], None], num_sent: int) -> int:
        """Pass the first signal on, and once more when a second one came; returns how many were passed on until now.

        Args:
            num_sent: what the last call returned, 0 at first.
        """
        wanted = (self.first is not None) + self.is_repeated
        if wanted > num_sent and self.first is not None:
            send(self.first)
        return max(wanted, num_sent)

    def __enter__(self) -> "Interrupts":
        numbers = [number for number in ending_signals() if number not in self._without]
        self._previous = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received.append((number, self._clock()))


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
    import asyncio  # here: the launcher and the ranks are no asyncio programs

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
