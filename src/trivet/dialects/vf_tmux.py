"""Runs `vf-rl` in a tmux session with two panes: the inference server's log above, the training below.

The session must not exist before, and it ends with the training, whose exit code the command returns. The module is also the
program of the lower pane, which runs the training: `main` with a job file.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from trivet.config.layout import RunLayout
from trivet.errors import ConfigError
from trivet.process.lifetime import module_command
from trivet.process.signals import Interrupts

DEFAULT_SESSION = "vf-rl"
_POLL_INTERVAL_S = 0.2
"""Time between two checks of the lower pane, seconds. A user does not notice the delay."""
_LAST_LINES = 30
"""Lines of the lower pane that are shown after the session has ended: about a screen."""
_PRINT_PANE_ID = ("-P", "-F", "#{pane_id}")
_CLOSED = 129
"""Exit code if somebody closed the session: that of a process that SIGHUP ended."""
_KILLED = 137
"""Exit code if the lower pane wrote none, which only SIGKILL can cause: that of a process that SIGKILL ended."""


def require_tmux(session: str) -> None:
    """Raise a ConfigError if tmux is not installed, or if a session of this name exists."""
    if shutil.which("tmux") is None:
        raise ConfigError(
            "tmux is not installed; install it with 'sudo apt-get install tmux' (Debian, Ubuntu), 'sudo dnf install tmux' "
            "(Fedora) or 'brew install tmux', or add --no-tmux to run in this terminal"
        )
    if subprocess.run(["tmux", "has-session", "-t", f"={session}"], capture_output=True, check=False).returncode == 0:
        raise ConfigError(
            f"tmux session '{session}' exists already: attach with 'tmux attach -t {session}', end it with "
            f"'tmux kill-session -t {session}', or choose another name with -s"
        )


def run_in_tmux(command: Sequence[str], *, session: str, layout: RunLayout) -> int:
    """Start `command` in the lower pane, attach to the session if this is a terminal, and wait for the end of `command`.

    Returns the exit code of `command`. If the user detached or closed the terminal, `command` goes on and the result is 0.
    """
    with tempfile.TemporaryDirectory(prefix="trivet-vf-") as scratch, Interrupts(clock=time.monotonic) as interrupts:
        job, result = Path(scratch) / "job.json", Path(scratch) / "result"
        job.touch(mode=0o600)  # the environment may hold keys
        job.write_text(json.dumps({"command": command, "environ": dict(os.environ), "result": str(result)}))
        log = layout.log_file("inference.stdout").resolve()
        follow = ("tail", "-n", "200", "-F", "--", str(log))
        train = module_command("trivet.dialects.vf_tmux", str(job))
        top = _tmux("new-session", "-d", "-s", session, "-x", "200", "-y", "50", *_PRINT_PANE_ID, *follow)
        pane = _tmux("split-window", "-t", top, "-c", str(Path.cwd()), *_PRINT_PANE_ID, *train)
        for title, target in (("inference", top), ("trainer", pane)):
            _tmux("select-pane", "-t", target, "-T", title)
        _tmux("set-option", "-w", "-t", pane, "pane-border-status", "top")
        _tmux("set-option", "-w", "-t", pane, "pane-border-format", " #{pane_title} ")
        _tmux("set-option", "-w", "-t", pane, "remain-on-exit", "on")
        viewer = _attach(session)
        early_exit_code = _wait(job, result, session=session, pane=pane, viewer=viewer, interrupts=interrupts)
        if early_exit_code is not None:
            return early_exit_code
        last_lines = ""
        with suppress(ConfigError):  # the session was closed meanwhile
            last_lines = _tmux("capture-pane", "-p", "-t", pane, "-S", f"-{_LAST_LINES}")
            _tmux("kill-session", "-t", f"={session}")
        if viewer is not None:
            viewer.wait()
        _print_text("\n".join(line for line in last_lines.splitlines() if line.strip()))
        return int(result.read_text()) if result.exists() else _KILLED


def _attach(session: str) -> "subprocess.Popen[bytes] | None":
    """Show the session in this terminal.

    Returns the tmux client, a process that ends when the user detaches. Returns None without a terminal, and inside of tmux, whose
    own client shows the session.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        _print_text(f"session '{session}' is running; attach with: tmux attach -t {session}")
        return None
    if os.environ.get("TMUX"):
        _tmux("switch-client", "-t", f"={session}")
        return None
    return subprocess.Popen(["tmux", "attach-session", "-t", f"={session}"])


def _wait(
    job: Path,
    result: Path,
    *,
    session: str,
    pane: str,
    viewer: "subprocess.Popen[bytes] | None",
    interrupts: Interrupts,
) -> int | None:
    """Wait until the command has ended, and pass signals on to it.

    Args:
        job: the file that the lower pane's program removes when it has started the command.
        result: the file to which this program writes the exit code.
        viewer: the tmux client in this terminal, if there is one.

    Returns None when the command has ended, or an exit code if the user detached or the session was closed before.
    """
    show_pane, forwarded = ["tmux", "display-message", "-p", "-t", pane, "#{pane_dead} #{pane_pid}"], 0
    while not result.exists():
        words = subprocess.run(show_pane, capture_output=True, text=True, check=False).stdout.split()
        if len(words) != 2:
            _print_text(f"session '{session}' was closed")
            return _CLOSED
        is_dead, pid = words[0] == "1", int(words[1])
        if is_dead:
            return None
        if not job.exists():  # the lower pane has started the command
            if interrupts.first == signal.SIGHUP or (viewer is not None and viewer.poll() is not None):
                _print_text(f"session '{session}' goes on; attach again with: tmux attach -t {session}")
                return 0
            with suppress(ProcessLookupError):  # the process has just ended
                forwarded = interrupts.forward(partial(os.kill, pid), forwarded)
        time.sleep(_POLL_INTERVAL_S)
    return None


def _print_text(text: str) -> None:
    with suppress(OSError):  # the terminal was closed
        print(text, flush=True)  # noqa: T201


def _tmux(*words: str) -> str:
    """Run a tmux command and return its output."""
    done = subprocess.run(["tmux", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"tmux {words[0]} failed: {done.stderr.strip()}; --no-tmux runs in this terminal")
    return done.stdout.rstrip("\n")


def main(job: Path) -> int:
    """Run the lower pane's program: run the command of `job` with the user's environment variables, and write its exit code."""
    content = json.loads(job.read_text())
    process = subprocess.Popen(content["command"], env=content["environ"])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: process.send_signal(received))
    job.unlink()  # the waiting process forwards signals from now on; and no secret of the environment stays in a file
    code = process.wait()
    code = code if code >= 0 else 128 - code
    staging = Path(content["result"] + ".tmp")
    with suppress(FileNotFoundError):  # the waiting process has ended, and its directory is removed
        staging.write_text(str(code))
        staging.replace(content["result"])
    return code


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
