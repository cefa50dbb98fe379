"""Finds the interpreter that runs the workers of an environment, and says what is wrong with it before anything is started."""

import os
import sys
from pathlib import Path

from packaging.version import Version

from trivet.config.schema.environment import EnvConfig
from trivet.dependencies import InstalledPackages
from trivet.environments.packages.installed import require_installed
from trivet.environments.packages.venvs import find_venv_directory, find_venvs, find_venvs_of, package_directories
from trivet.errors import EnvironmentLoadError

OWN = "trivet"
"""Names the interpreter that runs trivet itself."""
AUTO = "auto"
WORKER_SOURCE = Path(__file__).parents[2] / "worker_distribution"
"""The directory that an installer builds `trivet-worker` from."""


def find_interpreter(env: EnvConfig) -> str:
    """Return the path of the interpreter for `env`; empty for trivet's own.

    Raises:
        EnvironmentLoadError: `env.venv` names no virtual environment, several have the environment, or the environment has another
            version than `env.id` asks for.
    """
    python = _find(env)
    if env.version is not None:
        _require_version(env, python)
    return python


def _find(env: EnvConfig) -> str:
    if env.venv == OWN:
        return ""
    if os.sep in env.venv:
        return _python_of_path(env)
    directory = find_venv_directory()
    if env.venv == AUTO:
        found = find_venvs_of(env.package, directory)
        if len(found) > 1:
            names = " and ".join(venv.name for venv in found)
            raise EnvironmentLoadError(
                f"environment {env.id!r} is in {names}: name one with env.venv, or remove it from the others"
            )
    else:
        venvs = find_venvs(directory)
        found = [venv for venv in venvs if venv.name == env.venv]
        if not found:
            raise EnvironmentLoadError(
                f"env.venv = {env.venv!r} of environment {env.label!r} is not there; virtual environments: "
                f"{', '.join(venv.name for venv in venvs) or 'none'}. Make it with: "
                f"uv run trivet env install {env.id} --venv {env.venv}"
            )
    return str(found[0].python) if found else ""


def require_environment(env: EnvConfig) -> None:
    """Check that `env` can be started, without starting anything.

    Raises:
        EnvironmentLoadError: its virtual environment or its package is not there; the message says how to get it.
    """
    if not find_interpreter(env):
        require_installed(env.package)


def describe_interpreter(env: EnvConfig) -> str:
    """Return in one line where the workers of `env` run, and with which versions."""
    python = find_interpreter(env)
    for venv in find_venvs(find_venv_directory()):
        if str(venv.python) == python:
            return f"virtual environment {venv.describe()}"
    package = InstalledPackages(_site_of(python)).find("verifiers")
    return f"{python or 'the Python of trivet'}, verifiers {package.version if package else 'not installed'}"


def _require_version(env: EnvConfig, python: str) -> None:
    if not python:
        require_installed(env.package)
    package = InstalledPackages(_site_of(python)).find(env.package.rpartition("/")[2])
    if package is None or Version(package.version) != env.version:
        found = (
            f"{package.version} is installed" if package else "no package of that name, which would tell its own, is installed"
        )
        where = python or "the Python of trivet"
        raise EnvironmentLoadError(
            f"env.id = {env.id!r} asks for version {env.version}, and {found} ({where}); install it: uv run trivet env install "
            f"{env.id}, or write env.id = {env.package!r}"
        )


def _python_of_path(env: EnvConfig) -> str:
    python = Path(env.venv).expanduser().absolute() / "bin" / "python"
    if not python.is_file():
        raise EnvironmentLoadError(
            f"env.venv = {env.venv!r} of environment {env.label!r} is no virtual environment: no {python}"
        )
    installed = InstalledPackages(_site_of(str(python)))
    if installed.find("trivet-worker") is None and installed.find("trivet") is None:
        raise EnvironmentLoadError(
            f"env.venv = {env.venv!r} of environment {env.label!r} has no trivet-worker; install it with: uv pip install --python "
            f"{python} {WORKER_SOURCE}"
        )
    return str(python)


def _site_of(python: str) -> list[str] | None:
    """Return the directories of packages of a virtual environment; None for those of this interpreter."""
    if not python or python == sys.executable:
        return None
    return package_directories(Path(python).parents[1])
