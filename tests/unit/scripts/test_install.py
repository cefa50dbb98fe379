"""Run scripts/install.sh with stand-ins for uv and nvidia-smi that only record their arguments."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.scripts import SCRIPTS


class Machine:
    """A checkout with its own PATH."""

    def __init__(self, root: Path) -> None:
        self.checkout, self.bin, self.calls = root / "checkout", root / "bin", root / "calls"
        (self.checkout / "scripts").mkdir(parents=True)
        (self.checkout / "environments" / "toy").mkdir(parents=True)
        self.bin.mkdir()
        shutil.copy(SCRIPTS / "install.sh", self.checkout / "scripts")
        (self.checkout / "pyproject.toml").touch()
        (self.checkout / "environments" / "toy" / "pyproject.toml").touch()
        (self.bin / "python3").symlink_to(sys.executable)
        self.add_command(
            "uv", f'echo "$UV_FIND_LINKS|$*" >>{self.calls}\nmkdir -p .venv/bin\nln -sf /bin/true .venv/bin/python'
        )

    def add_command(self, name: str, body: str) -> None:
        (self.bin / name).write_text(f"#!/bin/bash\n{body}\n")
        (self.bin / name).chmod(0o755)

    def install(self, **environment: str) -> str:
        """Run the script and return what it printed."""
        done = self.try_install(**environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def try_install(self, **environment: str) -> "subprocess.CompletedProcess[str]":
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
        clean |= {"PATH": f"{self.bin}:/usr/bin:/bin", "PIP_CONFIG_FILE": os.devnull} | environment
        return subprocess.run(
            ["bash", "scripts/install.sh"],
            cwd=self.checkout,
            env=clean,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    def uv_calls(self) -> list[tuple[str, str]]:
        """Return find-links and arguments of each call of uv."""
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        return [(links, arguments) for links, arguments in (line.split("|", 1) for line in lines)]


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


def test_without_a_gpu_the_cpu_build_is_installed(machine):
    said = machine.install()
    [(links, arguments)] = machine.uv_calls()
    assert "--extra cpu" in arguments
    assert links == ""
    assert "set UV_FIND_LINKS" in said


def test_with_a_gpu_the_cuda_build_is_installed(machine):
    machine.add_command("nvidia-smi", "echo 'GPU 0: some GPU'")
    machine.install()
    [(links, arguments)] = machine.uv_calls()
    assert "--extra cuda" in arguments
    assert links == ""


def test_the_cuda_build_gets_no_wheels_that_pip_is_told_about(machine, tmp_path):
    """Among them may be a CPU torch."""
    machine.add_command("nvidia-smi", "echo 'GPU 0: some GPU'")
    (tmp_path / "torch-2.13.0+cpu-cp311-cp311-any.whl").touch()
    machine.install(PIP_FIND_LINKS=str(tmp_path))
    [(links, arguments)] = machine.uv_calls()
    assert "--extra cuda" in arguments
    assert links == ""


def test_a_directory_with_the_cpu_torch_is_passed_on(machine, tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "torch-2.13.0+cpu-cp311-cp311-any.whl").touch()
    said = machine.install(PIP_FIND_LINKS=str(wheels))
    assert machine.uv_calls()[0][0] == str(wheels)
    assert "UV_FIND_LINKS" not in said


def test_a_second_run_installs_nothing_until_the_dependencies_change(machine):
    machine.install()
    assert "everything is there" in machine.install()
    assert len(machine.uv_calls()) == 1
    (machine.checkout / "environments" / "toy" / "pyproject.toml").write_text("changed")
    machine.install()
    assert len(machine.uv_calls()) == 2


def test_a_failure_of_uv_ends_the_script_with_its_message(machine):
    machine.add_command("uv", 'echo "error: no such wheel" >&2; exit 2')
    done = machine.try_install()
    assert done.returncode == 1
    assert done.stderr.index("install: uv: error: no such wheel") < done.stderr.index("install: uv sync failed")
    assert not (machine.checkout / ".venv" / ".installed").exists()


def test_a_python_that_is_too_old_is_passed_over(machine):
    (machine.bin / "python3").unlink()
    machine.add_command("python3", "exit 1")
    (machine.bin / "python3.12").symlink_to(sys.executable)
    machine.install()
    assert f"--python {machine.bin}/python3.12" in machine.uv_calls()[0][1]
