"""The wheel is complete: without the checkout its commands run, and its workspace trains."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from support.documents import ROOT
from trivet.cli.init import ENVIRONMENTS
from trivet.config.layout import RunLayout
from trivet.history.check import check_run

COMMANDS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
HELP_TIMEOUT_S = 120
SYNC_TIMEOUT_S = 1800
"""A first `uv sync` downloads 3 GB."""
TRAIN_TIMEOUT_S = 3600
"""The quickstart takes four minutes on two idle cores."""


_CHECKOUT_VARIABLES = ("VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT", "UV_NO_SYNC", "PYTHONPATH")
"""Variables that would lead a workspace's commands back to this checkout."""


def find_uv() -> str:
    uv = os.environ.get("UV") or shutil.which("uv")
    assert uv is not None, "uv is not on PATH; bash scripts/install.sh brings it"
    return uv


def run_outside(*words: str | Path, cwd: Path, timeout_s: float, **environment: str) -> str:
    """Run a command in `cwd` like a user without the checkout, and return its output. A failure shows the output's end."""
    clean: Mapping[str, str] = {name: value for name, value in os.environ.items() if name not in _CHECKOUT_VARIABLES}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**clean, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{words}:\n{done.stdout[-6000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dist")
    run_outside(find_uv(), "build", "--wheel", "--quiet", "--out-dir", directory, ROOT, cwd=ROOT, timeout_s=300)
    [wheel] = directory.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def commands(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the commands of a virtual environment that has the wheel and nothing else."""
    uv, root = find_uv(), tmp_path_factory.mktemp("installed")
    run_outside(uv, "venv", "--quiet", "--python", sys.executable, "start", cwd=root, timeout_s=120)
    run_outside(uv, "pip", "install", "--quiet", "--python", "start", "--no-deps", wheel, cwd=root, timeout_s=120)
    return root / "start" / "bin"


@pytest.fixture(scope="module")
def workspace(commands: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("outside")
    run_outside(commands / "trivet", "init", "lab", cwd=root, timeout_s=HELP_TIMEOUT_S)
    yield root / "lab"
    shutil.rmtree(root / "lab/.venv", ignore_errors=True)  # pytest keeps the directories of three runs: 3.3 GB each


def test_the_wheel_carries_configurations_environments_and_templates(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {f"trivet/example_configs/{path.relative_to(ROOT / 'configs')}" for path in (ROOT / "configs").rglob("*.toml")}
    for name in ENVIRONMENTS:
        folder = f"trivet/example_environments/{name.replace('-', '_')}"
        expected |= {f"{folder}/pyproject.toml", f"{folder}/README.md"}
    expected |= {"trivet/cli/templates/workspace_pyproject.toml", "trivet/view/static/index.html", "trivet_commands.pth"}
    assert expected - names == set()
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_of_the_wheel_answers(command: str, commands: Path, tmp_path: Path) -> None:
    """The dependencies are this environment's. Only the code is the wheel's."""
    dependencies = sysconfig.get_path("purelib")
    said = run_outside(commands / command, "--help", cwd=tmp_path, timeout_s=HELP_TIMEOUT_S, PYTHONPATH=dependencies)
    assert said.startswith("usage:")


def test_a_workspace_is_made_from_the_wheel_alone(wheel: Path, workspace: Path) -> None:
    project = tomllib.loads((workspace / "pyproject.toml").read_text())
    assert project["tool"]["uv"]["sources"]["trivet"] == {"path": str(wheel)}
    assert (workspace / "environments/reverse_text/reverse_text.py").is_file()
    assert (workspace / "configs/quickstart/rl.toml").is_file()


def test_a_configuration_of_the_workspace_holds_with_the_code_of_the_wheel(commands: Path, workspace: Path) -> None:
    places = f"{sysconfig.get_path('purelib')}:{workspace / 'environments/reverse_text'}"
    words = ["@", "configs/reverse_text/rl.toml", "--dry-run"]
    said = run_outside(commands / "prime-rl", *words, cwd=workspace, timeout_s=300, PYTHONPATH=places)
    assert "reverse-text" in said


def test_two_commands_train_the_quickstart_in_the_workspace(workspace: Path) -> None:
    uv = find_uv()
    run_outside(uv, "sync", "--extra", "cpu", "--quiet", cwd=workspace, timeout_s=SYNC_TIMEOUT_S)
    said = run_outside(uv, "run", "trivet", "quickstart", cwd=workspace, timeout_s=TRAIN_TIMEOUT_S)
    print(said[said.index("before") :])
    held_out = re.search(r"^reward on held-out texts +([\d.]+) +([\d.]+)$", said, re.MULTILINE)
    assert held_out is not None
    before, after = map(float, held_out.groups())
    assert after > before + 0.2
    assert not check_run(RunLayout(workspace / "outputs/quickstart/run")).ledger.breaches
    assert "usage: eval [@" in run_outside(uv, "run", "eval", "--help", cwd=workspace, timeout_s=HELP_TIMEOUT_S)
    assert "usage: trivet init" in run_outside(uv, "run", "vf-setup", "--help", cwd=workspace, timeout_s=HELP_TIMEOUT_S)
