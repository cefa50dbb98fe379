"""Runs a command of trivet as a child process of the program that uses the library. The run ends with this process.

The process leads a session of its own, so Ctrl-C in a terminal reaches only the program, which passes it on: after the first Ctrl-C
the run commits and ends, after the second it ends at once. When the program is killed, the kernel ends the process.
"""

import atexit
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from trivet.config.dump import to_toml
from trivet.config.schema.base import Section
from trivet.dialects.vf_translation import RUN_NAMES
from trivet.errors import ConfigError, Diverged, RoleFailed, TrivetError
from trivet.launcher.logs import last_lines
from trivet.process.lifetime import module_command, tied_command
from trivet.process.signals import ending_signals
from trivet.shown_text import printable
from trivet.storage.durable import write_private

_POLL_INTERVAL_S = 0.05
_SIGNAL_EXIT_CODES = 128
"""A command that a signal ended exits with a code above this."""
_KILL_TIMEOUT_S = 5.0
"""Longest wait for a killed process to end. It takes milliseconds, unless a system call hangs."""
_COMMIT_TIMEOUT_S = 60.0
"""Time that the launcher needs after its own deadline, to kill remaining processes and to write its last status."""
_NUM_LINES = 30
"""Lines of output that an error shows."""
_ARGS_PREFIX = "trainer.args."
PYTHON_NAMES = {
    **{key: name.removeprefix(_ARGS_PREFIX) for key, name in RUN_NAMES.items() if name.startswith(_ARGS_PREFIX)},
    _ARGS_PREFIX: "",
    "model.name": "model",
    "inference.gpus": "inference_gpu_ids",
    "trainer.gpus": "trainer_gpu_ids",
    "--trainer.ckpt.resume-step -1": "resume_from_checkpoint=True",
    "--ckpt.resume-step -1": "resume_from_checkpoint=True",
    "ckpt.resume_step = -1": "resume_from_checkpoint=True",
    "--clean": "overwrite_output_dir=True",
}
"""The names that users of `RLTrainer` know, by key or flag of the run; see `trivet.key_names`. Other keys have equal names."""
_ERRORS: Mapping[int, type[TrivetError]] = {2: ConfigError, 3: Diverged}
"""The error that an exit code of the command stands for. Any other code but 0 means that a role failed."""
_ERROR_PREFIX = re.compile(r"^error: ", re.MULTILINE)
"""The beginning of the message of an error that ended the command."""


@dataclass(slots=True, eq=False)
class RunProcess:
    """Runs a command with one configuration while a `with` block is active. The block may be entered again."""

    module: str
    """The module of the command, which reads the configuration from a file after `@`."""
    config: Section
    variables: Mapping[str, str]
    """Environment variables of the command, in addition to those of this process."""
    stop_timeout_s: float = 0.0
    """The time that the command gives its own processes to commit and end."""
    _folder: Path | None = None
    _process: "subprocess.Popen[bytes] | None" = None
    _is_interrupted: bool = False
    _handlers: dict[signal.Signals, Any] = field(default_factory=dict[signal.Signals, Any])
    """The program's own handlers of the signals that this object handles."""

    def __enter__(self) -> "RunProcess":
        """Start the command. Its output goes to a file, and this process handles signals until the block ends."""
        self._folder, self._is_interrupted = Path(tempfile.mkdtemp(prefix="trivet-run-")), False
        file = self._folder / "run.toml"
        write_private(file, to_toml(self.config))
        with (self._folder / "output").open("wb") as output:
            self._process = subprocess.Popen(
                tied_command(module_command(self.module, "@", str(file))),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **self.variables},
            )
        atexit.register(self.close)
        if threading.current_thread() is threading.main_thread():  # no other thread may set handlers
            for number in ending_signals():
                self._handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def exit_code(self) -> int | None:
        """The exit code as in a shell (128 + N for signal N); None while the command runs."""
        assert self._process is not None, "it was started"
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    @property
    def is_running(self) -> bool:
        """True from the start of the command to its end."""
        return self._process is not None and self._process.poll() is None

    def last_output(self) -> str:
        """Return the last lines that the command printed."""
        assert self._folder is not None, "it was started and not closed"
        return "\n".join(last_lines(self._folder / "output", offset=0, count=_NUM_LINES))

    def require_success(self, *, details: str = "") -> None:
        """Raise the error that ended the command, by its exit code. Do nothing after success or a signal of this program.

        The message is the command's own error. Without one it is `details`, what the caller knows of the failure, or else the last
        lines of output.
        """
        if self.exit_code in (0, None) or (self._is_interrupted and (self.exit_code or 0) > _SIGNAL_EXIT_CODES):
            return
        output = printable(self.last_output())
        *_, error = _ERROR_PREFIX.split(output)  # the text after the last prefix; without a prefix the whole output
        text = error if error != output else f"the run ended with exit code {self.exit_code}: {details or output}"
        raise _ERRORS.get(self.exit_code or 1, RoleFailed)(text.strip())

    def stop(self) -> None:
        """Ask the command to commit and end, and wait for its end. Ctrl-C meanwhile ends it at once. May be called again."""
        if self._process is None:
            return
        if not self._is_interrupted:
            self._send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self.stop_timeout_s + _COMMIT_TIMEOUT_S
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                time.sleep(_POLL_INTERVAL_S)
            except KeyboardInterrupt:  # the handler has passed the signal on
                continue
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(_KILL_TIMEOUT_S)

    def close(self) -> None:
        """Stop the command and remove its files. May be called again."""
        self.stop()
        atexit.unregister(self.close)
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
        self._handlers = {}
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None

    def _send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the command, unless it has ended: then its own exit code says how."""
        if self._process is not None and self.is_running:
            self._is_interrupted = True
            self._process.send_signal(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on to the command, then do what the program's own handler does."""
        is_first_interrupt = number == signal.SIGINT and not self._is_interrupted
        if is_first_interrupt and self.is_running:
            sys.stderr.write("the run finishes its step and commits it; Ctrl-C again ends it at once\n")
        self._send_signal(signal.SIGTERM if is_first_interrupt else signal.Signals(number))
        own_handler = self._handlers.get(signal.Signals(number))
        if callable(own_handler):
            own_handler(number, frame)
        else:
            sys.exit(128 + number)
