"""Virtual environments that hold one release of verifiers, and what a worker and its tests need."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

INSTALL_TIMEOUT_S = 600.0
"""For a release whose packages are not in uv's cache."""


def interpreter_with(release: str, directory: Path, *packages: str) -> Path:
    """The interpreter of a virtual environment with a release of verifiers, and what a worker and these tests need."""
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("needs uv on the PATH")
    venv = Path(os.environ.get("VERIFIERS_VENVS", directory)) / "-".join(["verifiers", release, *packages])
    python = venv / "bin" / "python"
    if not python.exists():
        wanted = [f"verifiers=={release}", "msgspec", "numpy", *packages]
        for command in (["venv", "--quiet", str(venv)], ["pip", "install", "--quiet", "--python", str(python), *wanted]):
            # Outside of the repository: inside, uv would apply the project's own constraints, its verifiers among them.
            done = subprocess.run(
                [uv, *command], capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False, cwd=directory
            )
            assert done.returncode == 0, done.stderr
    return python
