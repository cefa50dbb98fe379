"""Runs a command of trivet as a process of the program that uses the library: its end is the end of the run.

The process leads a session of its own, so that Ctrl-C in a terminal reaches the program alone. The program passes it on, and waits
for the process. SIGTERM, by which the program ends the process itself, has it commit first. When the program is killed, the kernel
ends the process.
"""

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from trivet.config.dump import to_toml
from trivet.config.schema.base import Section
from trivet.launcher.logs import last_lines
from trivet.process.lifetime import module_command, tied_command
from trivet.process.signals import ending_signals
from trivet.storage.durable import write_private

_POLL_INTERVAL_S = 0.05
_KILL_TIMEOUT_S = 5.0
"""A killed process is gone within milliseconds, unless the kernel itself is stuck in it."""
_COMMIT_TIMEOUT_S = 60.0
"""Time that the launcher needs after its own deadline: killing what is left, and its last status."""
_NUM_LINES = 30


class RunProcess:
    """A command that works on one configuration."""

    def __init__(
        self, module: str, config: Section, *, stop_timeout_s: float = 0.0, variables: Mapping[str, str] | None = None
    ) -> None:
        """Start nothing.

        Args:
            module: the program, which reads a file after `@`.
            stop_timeout_s: the time that the command itself gives its processes to commit and end.
            variables: environment variables for the command, besides those of this process.
        """
        self._variables = variables or {}
        self._module = module
        self._config = config
        self._stop_timeout_s = stop_timeout_s + _COMMIT_TIMEOUT_S
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_interrupted = False
        self._handlers: dict[signal.Signals, Any] = {}

    def start(self) -> None:
        """Start the command; what it prints goes to a file."""
        self._folder = Path(tempfile.mkdtemp(prefix="trivet-run-"))
        file = self._folder / "run.toml"
        write_private(file, to_toml(self._config))
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                tied_command(module_command(self._module, "@", str(file))),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **self._variables},
            )
        atexit.register(self.close)
        self._pass_signals_on()

    @property
    def exit_code(self) -> int | None:
        """Exit code, as a shell counts it; None while the command runs."""
        assert self._process is not None, "it was started"
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    @property
    def is_interrupted(self) -> bool:
        """True once this program has asked the command to end."""
        return self._is_interrupted

    @property
    def is_running(self) -> bool:
        """True from the start of the command to its end."""
        return self._process is not None and self._process.poll() is None

    def last_output(self) -> str:
        """Return the last lines that the command printed."""
        return "\n".join(last_lines(self._output, offset=0, count=_NUM_LINES))

    def stop(self) -> None:
        """Have the command commit and end, and wait for it. Ctrl-C meanwhile asks it to hurry. May be called again."""
        if self._process is None:
            return
        if not self._is_interrupted:
            self._send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self._stop_timeout_s
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                time.sleep(_POLL_INTERVAL_S)
            except KeyboardInterrupt:  # the handler has passed it on
                continue
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(_KILL_TIMEOUT_S)

    def __enter__(self) -> "RunProcess":
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop, and remove the files of the command. May be called again."""
        self.stop()
        atexit.unregister(self.close)
        self._restore_signals()
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None

    @property
    def _output(self) -> Path:
        assert self._folder is not None, "it was started and not closed"
        return self._folder / "output"

    def _send_signal(self, number: signal.Signals) -> None:
        self._is_interrupted = True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _pass_signals_on(self) -> None:
        """Pass what asks this process to end on, in addition to what they did before. Only the main thread may set handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in ending_signals():
            self._handlers[number] = signal.getsignal(number)
            signal.signal(number, self._handler(self._handlers[number]))

    def _handler(self, before: Any) -> Callable[[int, FrameType | None], None]:
        def handle(number: int, frame: FrameType | None) -> None:
            self._send_signal(signal.Signals(number))
            if callable(before):
                before(number, frame)
            else:
                sys.exit(128 + number)

        return handle

    def _restore_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, before in self._handlers.items():
                signal.signal(number, before)
        self._handlers = {}
