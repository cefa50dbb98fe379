"""Shows where a process is, on request: the stacks of its threads, and what its asyncio tasks wait for, in its log.

Roles and environment workers listen from when they report, and ignore the signal before; the launcher asks when nothing moves or
before it ends a role that hangs, a pool before it ends a worker that is blocked.
"""

import faulthandler
import gc
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

STACKS_SIGNAL = signal.SIGUSR2
STACKS_WITHIN_S = 0.5
"""Seconds that a process which is about to be ended has to write them."""
_MAX_DEPTH = 100


def show_stacks_on_signal() -> None:
    """Write the stack of every thread to stderr on STACKS_SIGNAL, whatever they are doing; holds for what is forked, too."""
    _register(does_call_on=False)


def show_tasks_on_signal() -> None:
    """Have STACKS_SIGNAL also write what the tasks of the running event loop wait for. Main thread only."""
    import asyncio

    loop = asyncio.get_running_loop()

    def show(number: int, frame: FrameType | None) -> None:
        if not loop.is_closed():
            sys.stderr.write(f"{_describe_tasks(loop)}\n")

    # Not a handler of the loop's: with the loop would go what makes this process listen at all.
    faulthandler.unregister(STACKS_SIGNAL)
    signal.signal(STACKS_SIGNAL, show)
    _register(does_call_on=True)


def ignore_until_listening() -> None:
    """Ignore STACKS_SIGNAL in the program that this process is about to become, until that one listens itself."""
    signal.signal(STACKS_SIGNAL, signal.SIG_IGN)


def _register(*, does_call_on: bool) -> None:
    """Write the threads' stacks on the signal; with `does_call_on` also call the handler that was set before."""
    if sys.__stderr__ is not None:  # it was not closed before the start
        faulthandler.register(STACKS_SIGNAL, file=sys.__stderr__, all_threads=True, chain=does_call_on)


def _describe_tasks(loop: "asyncio.AbstractEventLoop") -> str:
    """Return each task's name and the lines where it and what it awaits are suspended, the innermost last."""
    import asyncio

    lines = ["Tasks (innermost await last):"]
    for task in sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name()):
        lines.append(f"  {task.get_name()}")
        awaited: Any = task.get_coro()
        for _ in range(_MAX_DEPTH):
            if (kind := _kind_of(awaited)) is None:
                # A step of an asynchronous generator, or a wrapper, keeps what it drives to itself.
                awaited = next((value for value in gc.get_referents(awaited) if _kind_of(value) is not None), None)
                kind = _kind_of(awaited)
            if kind is None:
                break
            frame = getattr(awaited, f"{kind}_frame")
            lines.append(f"    {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
            awaited = getattr(awaited, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
    return "\n".join(lines)


def _kind_of(awaited: Any) -> str | None:
    """Return the prefix of the attributes of a suspended coroutine, generator or asynchronous generator; None for all else."""
    return next((kind for kind in ("cr", "gi", "ag") if getattr(awaited, f"{kind}_frame", None) is not None), None)
