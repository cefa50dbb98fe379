"""Run scripts/test.sh with stand-ins for the installer and uv that say what they were asked for."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from support.scripts import SCRIPTS


def run_script(root: Path, *, has_gpu: bool) -> str:
    (root / "scripts").mkdir()
    shutil.copy(SCRIPTS / "test.sh", root / "scripts")
    (root / "scripts" / "install.sh").write_text(f"has_nvidia_gpu() {{ {str(has_gpu).lower()}; }}\n")
    (root / "bin").mkdir()
    uv = root / "bin" / "uv"
    uv.write_text('#!/bin/bash\necho "GPUs: ${CUDA_VISIBLE_DEVICES-all}, uv $*"\n')
    uv.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        ["bash", "scripts/test.sh", "tests/unit"],
        cwd=root,
        env=environment | {"PATH": f"{root / 'bin'}:{environment['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize(
    ("has_gpu", "expected"),
    [
        (False, "GPUs: all, uv run --no-sync pytest -m not slow and not gpu -n 3"),
        (True, "GPUs: , uv run --no-sync pytest -m not slow and not gpu and not vllm -n 3"),
    ],
)
def test_on_a_machine_with_a_gpu_the_suite_leaves_it_alone(has_gpu: bool, expected: str, tmp_path: Path) -> None:
    last = run_script(tmp_path, has_gpu=has_gpu).splitlines()[-1]
    assert last.startswith(expected)
    assert last.endswith("tests/unit")
