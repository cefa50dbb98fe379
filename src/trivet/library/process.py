"""Runs a command of trivet as a process of the program that uses the library: its end is the end of the run.

The process leads a session of its own, so that Ctrl-C in a terminal reaches the program alone. The first Ctrl-C has the run commit
and end, and the second ends it at once. When the program is killed, the kernel ends the process.
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
from pathlib import Path
from types import FrameType, TracebackType
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
_KILL_TIMEOUT_S = 5.0
"""A killed process is gone within milliseconds, unless the kernel itself is stuck in it."""
_COMMIT_TIMEOUT_S = 60.0
"""Time that the launcher needs after its own deadline: killing what is left, and its last status."""
_NUM_LINES = 30
_ARGS = "trainer.args."
PYTHON_NAMES = {
    **{key: name.removeprefix(_ARGS) for key, name in RUN_NAMES.items() if name.startswith(_ARGS)},
    _ARGS: "",
    "model.name": "model",
    "inference.gpus": "inference_gpu_ids",
    "trainer.gpus": "trainer_gpu_ids",
    "--trainer.ckpt.resume-step -1": "resume_from_checkpoint=True",
    "--ckpt.resume-step -1": "resume_from_checkpoint=True",
    "ckpt.resume_step = -1": "resume_from_checkpoint=True",
    "--clean": "overwrite_output_dir=True",
}
"""Names of keys and flags in the messages of a run that `RLTrainer` starts. `RLConfig` takes all other keys by their own names."""
_ERRORS: Mapping[int, type[TrivetError]] = {2: ConfigError, 3: Diverged}
"""Meanings of a command's exit codes; any other than 0 means that a role failed."""
_REFUSAL = re.compile(r"^error: ", re.MULTILINE)
"""Prefix of a refusal."""


class RunProcess:
    """A command that works on one configuration, from entering the block to its end. The block may be entered again."""

    def __init__(
        self, module: str, config: Section, *, stop_timeout_s: float = 0.0, variables: Mapping[str, str] | None = None
    ) -> None:
        """Start nothing. `module` reads a file after `@`, and gives its own processes `stop_timeout_s` to commit and end."""
        self._variables = variables or {}
        self._module = module
        self._config = config
        self._stop_timeout_s = stop_timeout_s + _COMMIT_TIMEOUT_S
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_interrupted = False
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "RunProcess":
        """Start the command; what it prints goes to a file."""
        self._folder, self._is_interrupted = Path(tempfile.mkdtemp(prefix="trivet-run-")), False
        file = self._folder / "run.toml"
        write_private(file, to_toml(self._config))
        with (self._folder / "output").open("wb") as output:
            self._process = subprocess.Popen(
                tied_command(module_command(self._module, "@", str(file))),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **self._variables},
            )
        atexit.register(self.close)
        if threading.current_thread() is threading.main_thread():  # no other thread may set handlers
            for number in ending_signals():
                self._handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def exit_code(self) -> int | None:
        """Exit code, as a shell counts it; None while the command runs."""
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
        """Raise the error that ended the command, by its exit code, unless it succeeded or this program ended it.

        The text has the last lines of what failed, or `details`: what is known of the failure besides the command's output.
        """
        if self.exit_code in (0, None) or self._is_interrupted:
            return
        printed = printable(self.last_output())
        *_, last = _REFUSAL.split(printed)
        text = last if last != printed else f"the run ended with exit code {self.exit_code}: {details or printed}"
        raise _ERRORS.get(self.exit_code or 1, RoleFailed)(text.strip())

    def stop(self) -> None:
        """Have the command commit and end, and wait for it. Ctrl-C meanwhile ends it at once. May be called again."""
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

    def close(self) -> None:
        """Stop, and remove the files of the command. May be called again."""
        self.stop()
        atexit.unregister(self.close)
        if threading.current_thread() is threading.main_thread():
            for number, before in self._handlers.items():
                signal.signal(number, before)
        self._handlers = {}
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None

    def _send_signal(self, number: signal.Signals) -> None:
        self._is_interrupted = True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on, and do what this program did at it before."""
        is_first_interrupt = number == signal.SIGINT and not self._is_interrupted
        if is_first_interrupt and self.is_running:
            sys.stderr.write("the run finishes its step and commits it; Ctrl-C again ends it at once\n")
        self._send_signal(signal.SIGTERM if is_first_interrupt else signal.Signals(number))
        before = self._handlers.get(signal.Signals(number))
        if callable(before):
            before(number, frame)
        else:
            sys.exit(128 + number)
