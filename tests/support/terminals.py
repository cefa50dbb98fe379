"""Runs programs in a pseudo-terminal, with their own tmux server."""

import fcntl
import os
import pty
import select
import signal
import subprocess
import tempfile
import termios
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from support.processes import heed_signals

_LOOK_EVERY_S = 0.1


class Terminal:
    """
    >>> with tmux_sockets() as sockets:
    ...     terminal = Terminal(directory, sockets, ["vf-rl", "@", "vf.toml"])
    ...     terminal.type(b"\\x03")
    ...     code = terminal.wait(60)
    """

    def __init__(
        self, directory: Path, sockets: str, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self.environment = {
            **{name: value for name, value in os.environ.items() if name != "TMUX"},
            "TMUX_TMPDIR": sockets,
            "TERM": "xterm",
            **(environment or {}),
        }
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            command,
            cwd=directory,
            env=self.environment,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(theirs)
        self.shown = bytearray()
        self._is_closed = threading.Event()
        self._reader = threading.Thread(target=self._read, name="terminal")
        self._reader.start()

    def _read(self) -> None:
        while not self._is_closed.is_set():
            if select.select([self._ours], [], [], _LOOK_EVERY_S)[0]:
                try:
                    self.shown += os.read(self._ours, 1 << 16)
                except OSError:  # the other end is closed
                    break
        os.close(self._ours)

    def close(self) -> None:
        """Close the terminal like a window: SIGHUP tells the program, which can neither read nor write any more."""
        self._is_closed.set()
        self._reader.join()

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def tmux(self, *words: str) -> str:
        return subprocess.run(["tmux", *words], env=self.environment, capture_output=True, text=True, check=False).stdout

    def wait(self, timeout_s: float) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(10)
        return code

    def end(self) -> None:
        """End whatever still runs in it, at a test's end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.wait(10)

    @property
    def text(self) -> str:
        return self.shown.decode(errors="replace")


def _take_terminal() -> None:
    heed_signals()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextmanager
def tmux_sockets() -> Iterator[str]:
    """Make a directory for the sockets of a test's own tmux server. A socket's path must be short."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield directory
        subprocess.run(
            ["tmux", "kill-server"], env=os.environ | {"TMUX_TMPDIR": directory}, check=False, stderr=subprocess.DEVNULL
        )
