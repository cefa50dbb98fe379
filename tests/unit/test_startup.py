import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from support.packages import write_installed

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
REQUIREMENT = "msgspec>=0.20"


@pytest.fixture
def broken_installation(tmp_path: Path) -> Path:
    """Make a directory that hides the real packages: msgspec is too old, and no module of it can be imported."""
    write_installed(tmp_path, "trivet", "0.1.0", requires=[REQUIREMENT])
    write_installed(tmp_path, "msgspec", "0.19.0", modules={"msgspec.py": "raise ImportError('msgspec was imported')"})
    return tmp_path


@pytest.mark.parametrize("command", ["rl", "vf_rl", "sft", "trainer", "orchestrator", "inference"])
def test_a_command_names_the_wrong_version_before_it_imports_the_package(broken_installation: Path, command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"from trivet.startup import {command}; raise SystemExit({command}())"],
        env=os.environ | {"PYTHONPATH": str(broken_installation)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: the installed packages break trivet's requirements: msgspec 0.19.0 is installed")
    assert "run `bash scripts/install.sh`" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_every_command_of_a_run_starts_with_the_check() -> None:
    scripts = tomllib.loads(PYPROJECT.read_text())["project"]["scripts"]
    checked = {name for name, target in scripts.items() if target == f"trivet.startup:{name.replace('-', '_')}"}
    assert checked == {"rl", "vf-rl", "sft", "trainer", "orchestrator", "inference"}
