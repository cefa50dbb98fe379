"""Starts and ends the operating-system process of one worker, says how it ended, and quotes its log.

Owned by `client.WorkerClient`. It knows nothing of what the worker is asked. The process runs the interpreter that the settings
name, which may be that of another virtual environment, and has a directory of its own for temporary files.
"""

import asyncio
import os
import socket
import sys
from collections.abc import Callable

from trivet.environments.settings import interpreter_variables, worker_environment
from trivet.environments.workers.containers import SCOPE
from trivet.environments.workers.worker_directory import WorkerDirectory
from trivet.environments.workers.worker_log import WorkerLog
from trivet.exits import describe_exit
from trivet.process.lifetime import end_session, module_command, tied_command
from trivet.process.stacks import STACKS_SIGNAL, STACKS_WITHIN_S
from trivet.wire.workers import HostSettings


class WorkerProcess:
    """The process of a worker, which leads a session of its own."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        *,
        log: WorkerLog,
        log_offset: int = 0,
        directory: WorkerDirectory | None = None,
        end_session: Callable[[int], object] = end_session,
    ) -> None:
        """Take over a started process.

        Args:
            log_offset: where its output begins in `log`, in bytes.
            directory: of its temporary files; it is removed when the process is.
            end_session: kills every process of the session that a pid leads.
        """
        self._process = process
        self._log = log
        self._log_offset = log_offset
        self._directory = directory
        self._end_session = end_session
        self._cause = ""

    @classmethod
    async def start(
        cls, settings: HostSettings, *, log: WorkerLog, channel: socket.socket, pulses: socket.socket
    ) -> "WorkerProcess":
        """Start a worker that speaks over `channel` and `pulses`; its output is appended to `log`."""
        log.path.parent.mkdir(parents=True, exist_ok=True)
        descriptors = ("--channel", str(channel.fileno()), "--pulse", str(pulses.fileno()))
        python = settings.python or sys.executable
        environ = worker_environment(os.environ, settings=[settings])
        directory = WorkerDirectory()
        with log.path.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *tied_command(module_command("trivet.environments.workers.main", *descriptors, python=python)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(channel.fileno(), pulses.fileno()),
                env={
                    **environ,
                    **interpreter_variables(python, environ),
                    "TMPDIR": str(directory.path),
                    SCOPE: directory.path.name,
                },
                start_new_session=True,
            )
            return cls(process, log=log, log_offset=output.tell(), directory=directory)

    @property
    def pid(self) -> int:
        """The process id, which is also the id of its session."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """It has not exited yet."""
        return self._process.returncode is None

    async def wait(self) -> None:
        """Wait for the process to exit."""
        await self._process.wait()

    def end(self, cause: str = "") -> None:
        """Kill the process, and everything that it started and left, at once.

        Args:
            cause: why, for `describe_end`; empty keeps the cause that is known.
        """
        self._cause = cause or self._cause
        self._end_session(self.pid)

    def clean_up(self) -> None:
        """Remove the temporary files of the process, which has ended. May be called again."""
        if self._directory is not None:
            self._directory.remove()

    async def kill(self, cause: str) -> None:
        """Let the process write its stacks to its log, then end it.

        Args:
            cause: why, for `describe_end`.
        """
        self._cause = cause
        if self.is_running:
            self._process.send_signal(STACKS_SIGNAL)
            await asyncio.sleep(STACKS_WITHIN_S)
        self.end()

    async def wait_or_end(self, *, timeout_s: float) -> None:
        """Wait for the process to exit by itself; end it after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            self.end()

    def describe_end(self) -> str:
        """Return how the process ended, or why it was ended, as the end of a sentence."""
        exit_code = self._process.returncode
        if self._cause:
            return self._cause
        how = describe_exit(exit_code)
        if exit_code is None:
            return f"is {how}"
        return f"was {how}" if exit_code < 0 else how

    def last_lines(self) -> str:
        """Return the end of the process's output, for an error message; empty when it wrote nothing."""
        return self._log.last_lines(since=self._log_offset)
