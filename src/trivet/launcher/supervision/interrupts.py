"""Turns SIGINT, SIGTERM and SIGHUP into values that can be polled."""

import signal
from collections.abc import Callable
from types import FrameType, TracebackType

from trivet.process.signals import ending_signals

_REPEATED_S = 1.0
"""One Ctrl-C may arrive twice, from the terminal and from `uv run`; a signal after this long is a second one."""


class Interrupts:
    """Keeps the signals that came since the start; one that was ignored then (nohup) stays ignored."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._received: list[tuple[int, float]] = []
        self._previous: dict[signal.Signals, object] = {}

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

    def __enter__(self) -> "Interrupts":
        self._previous = {number: signal.signal(number, self._note) for number in ending_signals()}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received.append((number, self._clock()))


def forward(interrupts: Interrupts, send: Callable[[int], None], forwarded: int) -> int:
    """Pass the first signal on, and once more when a second one came.

    Args:
        forwarded: what the last call returned, 0 at first.

    Returns:
        How many signals were passed on until now.
    """
    wanted = (interrupts.first is not None) + interrupts.is_repeated
    if wanted > forwarded and interrupts.first is not None:
        send(interrupts.first)
    return max(wanted, forwarded)
