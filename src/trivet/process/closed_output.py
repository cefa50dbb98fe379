"""Ends a command without a traceback when the reader of its output has closed the pipe, as `head -3` does after three lines.

Every command runs through `run_until_output_closes`. `telemetry.logs` uses `discard_output` for roles, which outlive their reader.
"""

import errno
import io
import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from trivet.shown_text import print_error

EXIT_CODE = 128 + signal.SIGPIPE
"""Exit code of a command that was ended by a closed pipe: 141."""
UNWRITABLE_EXIT_CODE = os.EX_IOERR
"""Exit code of a command whose output cannot be written: 74."""


def run_until_output_closes(command: Callable[[], int]) -> int:
    """Run `command` and flush its output. Characters that the output's encoding does not have are written as backslash escapes.

    Returns:
        The command's exit code; 141 if it ended because the reader of its output had closed the pipe; 74 if the output could not
        be written, as on a full disk; 130 if Ctrl-C ended it.

    Raises:
        BrokenPipeError: a pipe was closed that is not the output's.
    """
    outputs = [stream for stream in (sys.stdout, sys.stderr) if stream is not None and not stream.closed]
    for stream in outputs:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        exit_code = command()
        return exit_code if _flush_all(outputs) else UNWRITABLE_EXIT_CODE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (OSError, SystemExit, BaseExceptionGroup) as exc:
        if (code := _exit_code_for(exc, outputs)) is None:
            raise
        return code
    finally:
        # Python flushes once more when it ends, and would print a traceback when that fails.
        for stream in outputs:
            with suppress(OSError, ValueError):
                stream.flush()
            if is_closed(stream):
                discard_output(stream)


def _exit_code_for(error: OSError | SystemExit | BaseExceptionGroup[BaseException], outputs: list[TextIO]) -> int | None:
    """Return the exit code of a command that `error` ended because of its output; None when the error has another cause."""
    if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):
        return EXIT_CODE  # rich raises SystemExit with code 1 when the pipe is closed
    if isinstance(error, BaseExceptionGroup | BrokenPipeError):
        others = error.split(BrokenPipeError)[1] if isinstance(error, BaseExceptionGroup) else None
        return EXIT_CODE if others is None and any(map(is_closed, outputs)) else None
    if not _flush_all(outputs):
        return UNWRITABLE_EXIT_CODE
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        print_error(f"the output cannot be written: {error.strerror}")
        return UNWRITABLE_EXIT_CODE
    return None


def _flush_all(outputs: list[TextIO]) -> bool:
    """Write the buffered output and return whether that worked. A failure is printed to standard error, and further output
    dropped.
    """
    for stream in outputs:
        try:
            stream.flush()
        except BrokenPipeError:
            continue  # the reader has closed the pipe, which is not an error
        except (OSError, ValueError) as exc:
            discard_output(stream)
            if stream is not sys.stderr:
                print_error(f"the output cannot be written: {exc.strerror if isinstance(exc, OSError) else exc}")
            return False
    return True


def is_closed(stream: TextIO) -> bool:
    """Return whether `stream` is a pipe, a socket or a terminal that nobody reads any more."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
    except (OSError, ValueError):  # closed by this process, or not a file at all
        return False
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def discard_output(stream: TextIO) -> None:
    """Send all further output to `stream`, from any part of this process, to /dev/null."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
