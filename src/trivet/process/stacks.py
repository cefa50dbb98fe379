"""Shows where a process is, on request: the stacks of its threads, and what its asyncio tasks wait for, in its log.

Roles and environment workers listen from when they report, and ignore the signal before; the launcher asks when nothing moves or
before it ends a role that hangs, a pool before it ends a worker that is blocked.
"""

import faulthandler
import gc
import signal
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

STACKS_SIGNAL = signal.SIGUSR2
STACKS_WITHIN_S = 0.5
"""Seconds that a process which is about to be ended has to write them."""
_MAX_DEPTH = 100


def show_stacks_on_signal() -> None:
    """Write the stack of every thread to stderr on STACKS_SIGNAL, whatever they are doing; holds for what is forked, too."""
    _show_stacks(does_call_on=False)


def show_tasks_on_signal() -> None:
    """Have STACKS_SIGNAL also write what the tasks of the running event loop wait for. Main thread only."""
    import asyncio

    loop = asyncio.get_running_loop()

    def show(number: int, frame: FrameType | None) -> None:
        if not loop.is_closed():
            sys.stderr.write(f"{describe_tasks(loop)}\n")

    # Not a handler of the loop's: with the loop would go what makes this process listen at all.
    faulthandler.unregister(STACKS_SIGNAL)
    signal.signal(STACKS_SIGNAL, show)
    _show_stacks(does_call_on=True)


def ignore_until_listening() -> None:
    """Ignore STACKS_SIGNAL in the program that this process is about to become, until that one listens itself."""
    signal.signal(STACKS_SIGNAL, signal.SIG_IGN)


def _show_stacks(*, does_call_on: bool) -> None:
    """Register the handler. With `does_call_on` it also calls the handler before it."""
    if sys.__stderr__ is None:
        return  # it was closed before the start
    faulthandler.register(STACKS_SIGNAL, file=sys.__stderr__, all_threads=True, chain=does_call_on)


def describe_tasks(loop: "asyncio.AbstractEventLoop") -> str:
    """Return each task's name and the lines where it and what it awaits are suspended, the innermost last."""
    import asyncio

    lines = ["Tasks (innermost await last):"]
    for task in sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name()):
        lines.append(f"  {task.get_name()}")
        lines += [f"    {code.co_filename}:{line} in {code.co_name}" for code, line in _awaits(task.get_coro())]
    return "\n".join(lines)


def _awaits(awaited: Any) -> Iterator[tuple[CodeType, int]]:
    """Follow what each coroutine, generator or asynchronous generator waits for, until something that is none of them."""
    for _ in range(_MAX_DEPTH):
        kind = _kind_of(awaited)
        if kind is None:
            # A step of an asynchronous generator, or a wrapper, keeps what it drives to itself.
            awaited = next((value for value in gc.get_referents(awaited) if _kind_of(value) is not None), None)
            kind = _kind_of(awaited)
        if kind is None:
            return
        frame = getattr(awaited, f"{kind}_frame")
        yield frame.f_code, frame.f_lineno
        awaited = getattr(awaited, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")


def _kind_of(awaited: Any) -> str | None:
    return next((kind for kind in ("cr", "gi", "ag") if getattr(awaited, f"{kind}_frame", None) is not None), None)
