"""SIGINT, SIGTERM and SIGHUP as a value to look at."""

import signal
from collections.abc import Callable
from types import FrameType, TracebackType

_REPEATED_S = 1.0
"""One Ctrl-C may arrive twice, from the terminal and from `uv run`; a signal after this long is a second one."""


class Interrupts:
    """What came since the start; a signal that was ignored then (nohup) stays ignored.

    >>> with Interrupts(clock=time.monotonic) as interrupts:
    ...     interrupts.first
    """

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._received: list[tuple[int, float]] = []
        self._previous: dict[signal.Signals, object] = {}

    @property
    def first(self) -> int | None:
        return self._received[0][0] if self._received else None

    @property
    def is_repeated(self) -> bool:
        """Whoever sent the first does not want to wait for what it began."""
        return bool(self._received) and self.has_any_since(self._received[0][1] + _REPEATED_S)

    def has_any_since(self, moment: float) -> bool:
        return any(time > moment for _, time in self._received)

    def __enter__(self) -> "Interrupts":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received.append((number, self._clock()))


def forward(interrupts: Interrupts, send: Callable[[int], None], forwarded: int) -> int:
    """Pass the first signal on, and once more when a second one says that there is hurry; returns how many were."""
    wanted = (interrupts.first is not None) + interrupts.is_repeated
    if wanted > forwarded and interrupts.first is not None:
        send(interrupts.first)
    return max(wanted, forwarded)
