"""Builds the project's wheel and runs what it installs, outside of the checkout."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from support.documents import ROOT

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


def build_wheel(directory: Path) -> Path:
    """Build this checkout's wheel into `directory`."""
    run_outside(find_uv(), "build", "--wheel", "--quiet", "--out-dir", directory, ROOT, cwd=ROOT, timeout_s=300)
    [wheel] = directory.glob("*.whl")
    return wheel


def install_alone(wheel: Path, directory: Path) -> Path:
    """Install the wheel without dependencies into a new virtual environment. Return its directory of commands."""
    uv = find_uv()
    run_outside(uv, "venv", "--quiet", "--python", sys.executable, directory, cwd=directory.parent, timeout_s=120)
    run_outside(uv, "pip", "install", "--quiet", "--python", directory, "--no-deps", wheel, cwd=directory.parent, timeout_s=120)
    return directory / "bin"
