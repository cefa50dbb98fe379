"""`vf-rl` in a tmux session of two panes, the inference server's log above the trainer; and the program of the lower pane.

The session is ours: it must not exist before, and it ends with the training, whose exit code the command then has.
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
from pathlib import Path

from trivet.config.layout import RunLayout
from trivet.errors import ConfigError

DEFAULT_SESSION = "vf-rl"
_LOOK_EVERY_S = 0.2
_LAST_LINES = 30
_GIVE_ID = ("-P", "-F", "#{pane_id}")
_CLOSED = 129
"""As of a process that SIGHUP ended: somebody closed the session."""


def require_tmux(session: str) -> None:
    """
    Raises:
        ConfigError: tmux is not installed, or the session exists.
    """
    if shutil.which("tmux") is None:
        raise ConfigError(
            "tmux is not installed; install it with 'sudo apt-get install tmux' (Debian, Ubuntu), 'sudo dnf install tmux' "
            "(Fedora) or 'brew install tmux', or add --no-tmux to run in this terminal"
        )
    if _exists(session):
        raise ConfigError(
            f"tmux session '{session}' exists already: attach with 'tmux attach -t {session}', end it with "
            f"'tmux kill-session -t {session}', or choose another name with -s"
        )


def run_in_tmux(words: Sequence[str], *, session: str, layout: RunLayout) -> int:
    """Start `vf-rl` with `words` in the lower pane, attach if this is a terminal, and wait for its end.

    Returns:
        The training's exit code; 0 when the user detached and it goes on.
    """
    with tempfile.TemporaryDirectory(prefix="trivet-vf-") as scratch:
        order, result = Path(scratch) / "order.json", Path(scratch) / "result"
        order.touch(mode=0o600)  # the environment may hold keys
        command = [sys.executable, "-m", "trivet.launcher.vf_rl", *words, "--no-tmux"]
        order.write_text(json.dumps({"command": command, "environ": dict(os.environ), "result": str(result)}))
        log = layout.log_file("inference.stdout").resolve()
        follow = ("tail", "-n", "200", "-F", "--", str(log))
        train = (sys.executable, "-m", "trivet.launcher.vf_tmux", str(order))
        top = _tmux("new-session", "-d", "-s", session, "-x", "200", "-y", "50", *_GIVE_ID, *follow)
        pane = _tmux("split-window", "-t", top, "-c", str(Path.cwd()), *_GIVE_ID, *train)
        for title, each in (("inference", top), ("trainer", pane)):
            _tmux("select-pane", "-t", each, "-T", title)
        _tmux("set-option", "-w", "-t", pane, "pane-border-status", "top")
        _tmux("set-option", "-w", "-t", pane, "pane-border-format", " #{pane_title} ")
        _tmux("set-option", "-w", "-t", pane, "remain-on-exit", "on")
        return _wait(result, session=session, pane=pane)


def _wait(result: Path, *, session: str, pane: str) -> int:
    is_nested = bool(os.environ.get("TMUX"))
    viewer = None
    if sys.stdin.isatty() and sys.stdout.isatty():
        join = "switch-client" if is_nested else "attach-session"
        viewer = subprocess.Popen(["tmux", join, "-t", f"={session}"])
    else:
        print(f"session '{session}' is running; attach with: tmux attach -t {session}", flush=True)
    try:
        while not result.exists():
            if not _exists(session):
                print(f"session '{session}' was closed")
                return _CLOSED
            if viewer is not None and not is_nested and viewer.poll() is not None:
                print(f"session '{session}' goes on; attach again with: tmux attach -t {session}")
                return 0
            time.sleep(_LOOK_EVERY_S)
    except KeyboardInterrupt:
        os.kill(int(_tmux("display-message", "-p", "-t", pane, "#{pane_pid}")), signal.SIGINT)
        while not result.exists() and _exists(session):
            time.sleep(_LOOK_EVERY_S)
    code = int(result.read_text()) if result.exists() else _CLOSED
    said = _tmux("capture-pane", "-p", "-t", pane, "-S", f"-{_LAST_LINES}")
    _tmux("kill-session", "-t", f"={session}")
    if viewer is not None:
        viewer.wait()
    print("\n".join(line for line in said.splitlines() if line.strip()))
    return code


def _tmux(*words: str) -> str:
    """
    Raises:
        ConfigError: tmux could not do it.
    """
    done = subprocess.run(["tmux", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"tmux {words[0]} failed: {done.stderr.strip()}; --no-tmux runs in this terminal")
    return done.stdout.rstrip("\n")


def _exists(session: str) -> bool:
    return subprocess.run(["tmux", "has-session", "-t", f"={session}"], capture_output=True, check=False).returncode == 0


def main(order: Path) -> int:
    """The lower pane: run the command in the environment of whoever typed it, and leave its exit code."""
    said = json.loads(order.read_text())
    process = subprocess.Popen(said["command"], env=said["environ"])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: process.send_signal(received))
    code = process.wait()
    code = code if code >= 0 else 128 - code
    partial = Path(said["result"] + ".tmp")
    with suppress(FileNotFoundError):  # whoever waited for it has detached and gone
        partial.write_text(str(code))
        partial.replace(said["result"])
    return code


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
