"""Run `scripts/tmux.sh` with a real tmux."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.processes import wait_until

SCRIPT = Path(__file__).parents[2] / "scripts" / "tmux.sh"
TITLES = ["trainer", "orchestrator", "inference", "environments"]
needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """Make the environment of a separate tmux server. Its socket's path must be short."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        environment = {name: value for name, value in os.environ.items() if name != "TMUX"} | {"TMUX_TMPDIR": directory}
        yield environment
        if shutil.which("tmux") is not None:
            subprocess.run(["tmux", "kill-server"], env=environment, check=False, stderr=subprocess.DEVNULL)


def run_script(*arguments: str, environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["/bin/bash", str(SCRIPT), *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


@needs_tmux
def test_panes_follow_logs_that_appear_later(tmp_path: Path, environment: dict[str, str]) -> None:
    output_dir = tmp_path / "out put"
    result = run_script("-s", "run1", "-o", str(output_dir), environment=environment)
    assert result.returncode == 0, result.stderr
    assert "attach with: tmux attach -t run1" in result.stdout

    def tmux(*arguments: str) -> str:
        return subprocess.run(["tmux", *arguments], env=environment, check=True, capture_output=True, text=True).stdout

    panes = dict(line.split() for line in tmux("list-panes", "-t", "run1", "-F", "#{pane_title} #{pane_id}").splitlines())
    assert list(panes) == TITLES
    logs = output_dir / "logs"
    (logs / "env_workers").mkdir(parents=True)
    for name in TITLES[:3]:
        (logs / f"{name}.stdout").write_text(f"hello of {name}\n")
    (logs / "env_workers" / "reverse-text.log").write_text("hello of environments\n")
    for name, pane in panes.items():
        wait_until(
            lambda name=name, pane=pane: f"hello of {name}" in tmux("capture-pane", "-p", "-t", pane),
            timeout_s=120,
            waiting_for=f"the pane of {name}",
        )
    again = run_script("-s", "run1", "-o", str(output_dir), environment=environment)
    assert "exists already" in again.stdout


def test_a_machine_without_tmux_is_told_how_to_get_it(environment: dict[str, str]) -> None:
    result = run_script(environment=environment | {"PATH": "/nonexistent"})
    assert result.returncode == 1
    assert "apt-get install tmux" in result.stderr
    assert "tail -F outputs/logs/*.stdout" in result.stderr


@pytest.mark.parametrize("arguments", [("-x",), ("run1",), ("-s", "a.b")])
def test_wrong_arguments_are_refused(arguments: tuple[str, ...], environment: dict[str, str]) -> None:
    assert run_script(*arguments, environment=environment).returncode == 2
