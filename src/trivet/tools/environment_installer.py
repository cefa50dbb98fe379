"""Installs an environment into a virtual environment of its own, beside the one that trivet runs in, which never changes.

An installation builds a new virtual environment under a temporary name and then renames it into place.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from trivet.environments.packages.interpreters import WORKER_SOURCE
from trivet.environments.packages.venvs import EnvironmentVenv, find_venvs, find_venvs_of
from trivet.errors import ConfigError, DependencyError
from trivet.process.lock import FileLock
from trivet.tools.environment_source import InspectedPackage, PackageSource, inspect
from trivet.tools.installer import choose_installer, describe_conflicts, find_conflicts

RELEASES = {"v0": "verifiers>=0.3,<0.4", "v1": "verifiers>=0.4"}
"""The releases of verifiers that run an environment, by the generation of the API that it is written for."""


def install(source: PackageSource, *, directory: Path, venv: str | None) -> tuple[EnvironmentVenv, InspectedPackage]:
    """Install a package; return its virtual environment and what the package is.

    Args:
        directory: of all virtual environments.
        venv: the name of the virtual environment; None takes the environment's id.

    Raises:
        ConfigError: the package cannot be fetched or built, is no environment, or `venv` has another one.
        DependencyError: what it needs cannot be installed together. What was installed before stays.
    """
    inspected = inspect(source, installer=choose_installer())
    package = inspected.environment
    made = EnvironmentVenv(path=directory / (venv or package.module.replace("_", "-")))
    with _lock(directory):
        if venv is not None and made in find_venvs(directory) and not made.version_of(package.name):
            raise ConfigError(f"virtual environment {venv!r} has another environment; remove that, or choose another name")
        built, replaced = directory / f".{made.name}.new", directory / f".{made.name}.old"
        try:
            for left in (built, replaced):
                shutil.rmtree(left, ignore_errors=True)
            _build(built, source, RELEASES[inspected.api])
            if made.path.exists():
                made.path.rename(replaced)
            built.rename(made.path)
        finally:
            for left in (built, replaced):
                shutil.rmtree(left, ignore_errors=True)
    return made, inspected


def remove(env_id: str, *, directory: Path) -> None:
    """Remove an environment with its virtual environment.

    Raises:
        ConfigError: no virtual environment has it, or several do.
    """
    with _lock(directory):
        found = find_venvs_of(env_id, directory)
        if len(found) != 1:
            where = "no virtual environment" if not found else " and ".join(venv.name for venv in found)
            there = ", ".join(venv.name for venv in find_venvs(directory))
            raise ConfigError(f"{env_id} is in {where} of {directory}; virtual environments there: {there or 'none'}")
        shutil.rmtree(found[0].path)


def _lock(directory: Path) -> FileLock:
    directory.mkdir(parents=True, exist_ok=True)
    ignored = directory.parent / ".gitignore"
    if directory.parent.name == ".trivet" and not ignored.exists():
        ignored.write_text("*\n")
    return FileLock(directory / ".lock", what=f"the directory of virtual environments {str(directory)!r}")


def _build(path: Path, source: PackageSource, constraint: str) -> None:
    """Make a virtual environment and install into it."""
    uv = shutil.which("uv")
    # Relocatable, because it is renamed: the programs in it must not name the temporary directory.
    command = [uv, "venv", "--quiet", "--relocatable", "--python", sys.executable] if uv else [sys.executable, "-m", "venv"]
    done = subprocess.run([*command, str(path)], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise ConfigError(f"no virtual environment can be made in {path}: {(done.stderr or done.stdout).strip()}")
    installer = choose_installer(str(path / "bin" / "python"))
    with tempfile.NamedTemporaryFile("w", prefix="trivet-constraints-", suffix=".txt") as constraints:
        constraints.write(f"{constraint}\n")
        constraints.flush()
        done = installer.run([*source.index_words, "--constraint", constraints.name, str(WORKER_SOURCE), *source.words])
    if done.returncode != 0:
        message = (done.stdout + done.stderr).strip()
        reason = describe_conflicts(find_conflicts(message, [constraint]), constraints=[constraint]) or message
        raise DependencyError(f"{source.describe()} cannot be installed: {reason}")
