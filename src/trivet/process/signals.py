"""Tells a process of the signals that ask it to end, and shows the stacks of its threads on a signal.

Roles and environment workers write their stacks into their log on STACKS_SIGNAL from when they report, and ignore it before. The
launcher sends it when nothing moves or before it ends a role that hangs, a pool before it ends a worker that is blocked.
"""

import faulthandler
import signal
import sys
import time
from collections.abc import Callable, Collection
from types import FrameType, TracebackType
from typing import Any

STACKS_SIGNAL = signal.SIGUSR2
STACKS_WITHIN_S = 0.5
"""Seconds that a process which is about to be ended has to write them."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_REPEATED_S = 1.0
"""One Ctrl-C may arrive twice, from the terminal and from `uv run`; a signal after this long is a second one."""


def ending_signals() -> list[signal.Signals]:
    """Return the signals that ask this process to end: Ctrl-C, SIGTERM, and SIGHUP of a closed terminal.

    One that its starter has it ignore, as nohup does with SIGHUP, is not among them.
    """
    return [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]


def show_stacks_on_signal(*, does_call_on: bool = False) -> None:
    """Write the stack of every thread to stderr on STACKS_SIGNAL, whatever they are doing; holds for what is forked, too.

    Args:
        does_call_on: also call the handler that was set before.
    """
    if sys.__stderr__ is not None:  # it was not closed before the start
        faulthandler.register(STACKS_SIGNAL, file=sys.__stderr__, all_threads=True, chain=does_call_on)


def ignore_stacks_signal() -> None:
    """Ignore STACKS_SIGNAL in the program that this process is about to become, until that one listens itself."""
    signal.signal(STACKS_SIGNAL, signal.SIG_IGN)


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
