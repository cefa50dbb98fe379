import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.evaluations import ESCAPES, write_evaluation
from support.processes import wait_until
from support.terminals import Terminal
from trivet.cli.main import main

TIMEOUT_S = 60.0
_RESTORED = "\x1b[?1049l"
"""Leaves the screen that covers the terminal."""


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    write_evaluation(tmp_path, step=0, rewards=[[0.0], [1.0]])
    write_evaluation(tmp_path, step=5, rewards=[[1.0], [1.0]])
    write_evaluation(tmp_path, step=10, rewards=[[1.0]], is_complete=False)
    return tmp_path


def test_piped_output_is_the_list(run_directory: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["evals", str(run_directory)]) == 0
    heading, base, fifth, tenth = (line.split() for line in capsys.readouterr().out.splitlines())
    assert heading == ["policy", "environment", "mean", "reward", "±", "(95", "%)", "pass@k", "k", "examples", "failed"]
    assert base == ["base", "spelling", "0.5000", "0.1250", "0.7500", "1", "2", "0"]
    assert fifth[:4] == ["step", "5", "spelling", "1.0000"]
    assert tenth == ["step", "10", "spelling", "goes", "on"]


def test_a_program_reads_the_scores(run_directory: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["evals", str(run_directory), "--json"]) == 0
    base, fifth, tenth = json.loads(capsys.readouterr().out)
    assert (base["policy"], base["env"], base["summary"]["avg"]) == ("base", "spelling", 0.5)
    assert (fifth["summary"]["avg"], tenth["summary"]) == (1.0, None)


def test_the_list_needs_no_screens_and_no_wide_output(run_directory: Path):
    name = "long-name" * 20
    write_evaluation(run_directory, step=5, env=name, rewards=[[1.0]])
    program = "import sys; from trivet.cli.main import main; sys.exit(main(sys.argv[1:]) + 9 * ('textual' in sys.modules))"
    words = [sys.executable, "-c", program, "evals", str(run_directory / "evals" / "step_5")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert name in done.stdout


def test_escape_sequences_in_names_do_not_reach_the_output(run_directory: Path, capsys: pytest.CaptureFixture[str]):
    write_evaluation(run_directory, step=5, env=ESCAPES, rewards=[[1.0]])
    assert main(["evals", str(run_directory)]) == 0
    text = capsys.readouterr().out
    assert "\\x1b[2J\\x07[red]" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("name", ["empty", "missing"])
def test_a_directory_without_evaluations_ends_with_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str):
    (tmp_path / "empty").mkdir()
    assert main(["evals", str(tmp_path / name)]) == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["q", "ctrl_c", "sigterm"])
def test_on_a_terminal_keys_browse_and_the_terminal_is_restored(run_directory: Path, how: str):
    command = [str(Path(sys.executable).with_name("trivet")), "evals", str(run_directory)]
    terminal = Terminal(run_directory, "", command, {"COLUMNS": "120", "LINES": "40", "TERM": "xterm-256color"})
    try:
        wait_until(lambda: "goes on" in terminal.text, timeout_s=TIMEOUT_S, waiting_for="the list")
        terminal.type(b"\r")
        wait_until(lambda: "policy 0 answers 0" in terminal.text, timeout_s=TIMEOUT_S, waiting_for="the first rollout")
        terminal.type(b"n")
        wait_until(lambda: "policy 0 answers 1" in terminal.text, timeout_s=TIMEOUT_S, waiting_for="the second rollout")
        assert "\x1b[2J\x07" not in terminal.text
        if how == "sigterm":
            os.kill(terminal.process.pid, signal.SIGTERM)
        else:
            terminal.type(b"q" if how == "q" else b"\x03")
        assert terminal.wait(TIMEOUT_S) == (143 if how == "sigterm" else 0)
        assert _RESTORED in terminal.text
    finally:
        terminal.end()
