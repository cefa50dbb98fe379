"""Collects the signals that ask a process to end, and makes a process write the stacks of its threads on a signal.

Roles and environment workers write their stacks into their log on STACKS_SIGNAL once they report, and ignore the signal before. The
launcher sends it when a run stalls and before it ends a stuck role. A pool sends it before it ends a blocked worker.
"""

import faulthandler
import signal
import sys
import time
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

STACKS_SIGNAL = signal.SIGUSR2
STACKS_WITHIN_S = 0.5
"""Seconds that a process gets to write its stacks before it is ended."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_REPEATED_S = 1.0
"""One Ctrl-C may arrive twice, from the terminal and from `uv run`; a signal after this long is a second one."""


def ending_signals() -> list[signal.Signals]:
    """Return the signals that ask this process to end: SIGINT of Ctrl-C, SIGTERM, and SIGHUP of a closed terminal.

    A signal that this process was started to ignore is left out. For example, nohup ignores SIGHUP.
    """
    return [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]


def show_stacks_on_signal(*, does_call_on: bool = False) -> None:
    """Write the stack of every thread to stderr on each STACKS_SIGNAL, also when a thread is blocked. Forked processes do the same.

    Args:
        does_call_on: also call the handler that was set before.
    """
    if sys.__stderr__ is not None:  # None when stderr was closed before the start
        faulthandler.register(STACKS_SIGNAL, file=sys.__stderr__, all_threads=True, chain=does_call_on)


def ignore_stacks_signal() -> None:
    """Ignore STACKS_SIGNAL, also in the program that replaces this process, until that program sets a handler."""
    signal.signal(STACKS_SIGNAL, signal.SIG_IGN)


class Interrupts:
    """Records the signals that come during the block, so that a program can poll them."""

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, without: Collection[signal.Signals] = frozenset()
    ) -> None:
        """Record no signal before the block.

        Args:
            without: signals whose handling does not change in the block. A signal that was ignored before (nohup) stays ignored.
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
        """True when a second signal came: the user does not want to wait for an orderly end."""
        return bool(self._received) and self.has_any_since(self._received[0][1] + _REPEATED_S)

    def has_any_since(self, moment: float) -> bool:
        """Return whether a signal came after `moment`, in seconds of the clock."""
        return any(time > moment for _, time in self._received)

    def forward(self, send: Callable[[int], None], num_sent: int) -> int:
        """Send the first signal on, and once more when a second one came; at most once per call. Return the number of sendings.

        Args:
            num_sent: the result of the last call; 0 in the first call.
        """
        num_due = (self.first is not None) + self.is_repeated
        if num_due > num_sent and self.first is not None:
            send(self.first)
            return num_sent + 1
        return num_sent

    def __enter__(self) -> "Interrupts":
        numbers = [number for number in ending_signals() if number not in self._without]
        self._previous = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received.append((number, self._clock()))
