"""What a command does when whoever reads its output has gone, as `head -3` has after three lines: it ends without a traceback.

Every command runs through `run_until_output_closes`; `telemetry.logs` uses `discard_output` for roles, which outlive their reader.
"""

import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

EXIT_CODE = 128 + signal.SIGPIPE
"""The code of a program that a closed pipe ended: 141."""


def run_until_output_closes(command: Callable[[], int]) -> int:
    """Run `command` and flush what it printed.

    Returns:
        The command's exit code, or 141 if it ended because the reader of its output had closed the pipe.

    Raises:
        BrokenPipeError: another pipe than that of the output was closed.
    """
    try:
        return command()
    except BrokenPipeError:
        if not any(map(is_closed, _outputs())):
            raise
        return EXIT_CODE
    except SystemExit as exc:
        if not isinstance(exc.__context__, BrokenPipeError):
            raise
        return EXIT_CODE  # rich ends the program so, with code 1
    except BaseExceptionGroup as group:
        _, others = group.split(BrokenPipeError)
        if others is not None or not any(map(is_closed, _outputs())):
            raise
        return EXIT_CODE
    finally:
        # Python flushes once more when it ends, and would print a traceback of its own.
        for stream in _outputs():
            with suppress(OSError, ValueError):  # a full disk is reported by Python's own last flush
                stream.flush()
            if is_closed(stream):
                discard_output(stream)


def is_closed(stream: TextIO) -> bool:
    """Whether `stream` is a pipe, a socket or a terminal that nobody reads any more."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
    except (OSError, ValueError):  # closed by this process, or not a file at all
        return False
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def discard_output(stream: TextIO) -> None:
    """Let what is still written to `stream`, by whatever part of this process, go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, stream.fileno())
    finally:
        os.close(nowhere)


def _outputs() -> list[TextIO]:
    return [stream for stream in (sys.stdout, sys.stderr) if stream is not None and not stream.closed]
