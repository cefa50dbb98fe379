"""scripts/compile_packages.py compiles what has no current bytecode, and nothing else."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.scripts import SCRIPTS, load_script

compile_packages = load_script("compile_packages")


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    for name in ("a/__init__.py", "a/b.py", "a/tests/test_b.py", "c/py312_only.py", "a/data.txt"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x = 1\n")
    return tmp_path


def run(packages: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, SCRIPTS / "compile_packages.py", packages], capture_output=True, text=True, check=False, timeout=60
    )
    return done.returncode, done.stdout


def bytecode_of(path: Path) -> Path:
    return Path(importlib.util.cache_from_source(str(path)))


def test_packages_are_compiled_without_their_tests_and_files_for_another_python(packages: Path) -> None:
    assert run(packages) == (0, "install: 2 files to compile\n")
    assert bytecode_of(packages / "a" / "b.py").exists()
    assert not bytecode_of(packages / "a" / "tests" / "test_b.py").exists()


def test_a_second_time_only_what_changed_is_compiled(packages: Path) -> None:
    run(packages)
    assert list(compile_packages.outdated_files(packages)) == []
    changed = packages / "a" / "b.py"
    changed.write_text("x = 2\n")
    os.utime(changed, (1, 1))
    assert list(compile_packages.outdated_files(packages)) == [str(changed)]


def test_the_bytecode_is_what_python_takes_as_it_is(packages: Path) -> None:
    run(packages)
    bytecode = bytecode_of(packages / "a" / "b.py")
    before = bytecode.stat().st_mtime_ns
    subprocess.run([sys.executable, "-c", "import a.b"], cwd=packages, check=True, env={"PYTHONDONTWRITEBYTECODE": ""})
    assert bytecode.stat().st_mtime_ns == before


def test_a_file_that_cannot_be_compiled_leaves_the_others_compiled(packages: Path) -> None:
    (packages / "a" / "a.py").write_text("print 'Python 2'\n")
    assert run(packages)[0] == 1
    assert bytecode_of(packages / "a" / "b.py").exists()
