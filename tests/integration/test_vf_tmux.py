"""Run the tmux session of `vf-rl` with a real tmux and a stand-in for the training. Check signals and what is left."""

import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from support.processes import wait_until
from support.terminals import Terminal, tmux_sockets

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")

WITHIN_S = 120.0
VF_RL = """
import sys
from pathlib import Path
from trivet.config.layout import RunLayout
from trivet.dialects.vf_tmux import run_in_tmux

sys.exit(run_in_tmux([sys.executable, "-c", sys.argv[1]], session="mine", layout=RunLayout(Path("out"))))
"""
TRAINING = """
import os, signal, sys, time
from pathlib import Path

def leave(number, frame):
    Path("heard.tmp").write_text(signal.Signals(number).name)
    Path("heard.tmp").rename("heard")
    sys.exit(128 + number)

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, leave)
print("Step 1/3: reward=0.5", flush=True)
Path("pid").with_suffix(".tmp").write_text(str(os.getpid()))
Path("pid.tmp").rename("pid")
deadline = time.monotonic() + 120
while not Path("code").exists() and time.monotonic() < deadline:
    time.sleep(0.05)
sys.exit(int(Path("code").read_text()))
"""
Start = Callable[..., Terminal]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the session. Return once the training runs and is shown."""
    terminals = list[Terminal]()
    (tmp_path / "scratch").mkdir()
    with tmux_sockets() as sockets:

        def begin(**environment: str) -> Terminal:
            names = {"TMPDIR": str(tmp_path / "scratch"), **environment}
            terminals.append(Terminal(tmp_path, sockets, [sys.executable, "-c", VF_RL, TRAINING], names))
            wait_until((tmp_path / "pid").exists, timeout_s=WITHIN_S, waiting_for="the training")
            if not environment:
                wait_until(lambda: terminals[-1].tmux("list-clients", "-t", "mine"), timeout_s=WITHIN_S, waiting_for="a client")
            return terminals[-1]

        yield begin
    for terminal in terminals:
        terminal.end()


def training(directory: Path) -> psutil.Process:
    return psutil.Process(int((directory / "pid").read_text()))


def end_training(directory: Path, code: int) -> None:
    (directory / "code.tmp").write_text(str(code))
    (directory / "code.tmp").rename(directory / "code")


def heard(directory: Path) -> str:
    wait_until((directory / "heard").exists, timeout_s=WITHIN_S, waiting_for="a signal at the training")
    return (directory / "heard").read_text()


def assert_goes_on_and_leaves_nothing(terminal: Terminal, directory: Path) -> None:
    """Check that the training is not told that its viewer has gone, and that files for it are removed."""
    assert list((directory / "scratch").glob("trivet-vf-*")) == []
    assert terminal.tmux("list-sessions", "-F", "#{session_name}") == "mine\n"
    running = training(directory)
    assert not (directory / "heard").exists()
    end_training(directory, 0)
    psutil.wait_procs([running], timeout=WITHIN_S)
    assert not running.is_running()
    assert not (directory / "heard").exists()


@pytest.mark.parametrize("code", [0, 1, 3])
def test_the_trainings_exit_code_is_the_commands_and_the_session_ends(start: Start, tmp_path: Path, code: int) -> None:
    terminal = start()
    end_training(tmp_path, code)
    assert terminal.wait(WITHIN_S) == code
    assert terminal.text.count("Step 1/3: reward=0.5") >= 2  # in the pane, and in what is left on the terminal
    assert terminal.tmux("list-sessions") == ""


def test_ctrl_c_in_the_lower_pane_interrupts_the_training(start: Start, tmp_path: Path) -> None:
    terminal = start()
    terminal.type(b"\x03")
    assert terminal.wait(WITHIN_S) == 130
    assert heard(tmp_path) == "SIGINT"


def test_who_detaches_leaves_a_training_that_goes_on(start: Start, tmp_path: Path) -> None:
    terminal = start()
    terminal.type(b"\x02d")
    assert terminal.wait(WITHIN_S) == 0
    assert "session 'mine' goes on; attach again with: tmux attach -t mine" in terminal.text
    assert_goes_on_and_leaves_nothing(terminal, tmp_path)


def test_a_terminal_that_is_closed_leaves_a_training_that_goes_on(start: Start, tmp_path: Path) -> None:
    terminal = start()
    terminal.close()
    assert terminal.wait(WITHIN_S) == 0
    assert_goes_on_and_leaves_nothing(terminal, tmp_path)


def test_a_terminal_that_tmux_cannot_use_leaves_a_training_that_goes_on(start: Start, tmp_path: Path) -> None:
    terminal = start(TERM="dumb")
    assert terminal.wait(WITHIN_S) == 0
    assert_goes_on_and_leaves_nothing(terminal, tmp_path)


def test_a_session_that_is_closed_ends_the_training(start: Start, tmp_path: Path) -> None:
    terminal = start()
    terminal.tmux("kill-session", "-t", "mine")
    assert terminal.wait(WITHIN_S) == 129
    assert heard(tmp_path) == "SIGHUP"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_command_reaches_the_training(start: Start, tmp_path: Path, number: signal.Signals) -> None:
    terminal = start()
    terminal.process.send_signal(number)
    assert terminal.wait(WITHIN_S) == 128 + number
    assert heard(tmp_path) == number.name


def test_a_lower_pane_that_was_killed_ends_the_command(start: Start, tmp_path: Path) -> None:
    terminal = start()
    training(tmp_path).parent().kill()  # type: ignore[union-attr]  # the pane's program
    assert terminal.wait(WITHIN_S) == 137
    assert heard(tmp_path) == "SIGHUP"
