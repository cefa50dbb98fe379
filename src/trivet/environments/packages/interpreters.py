"""Finds the interpreter that runs the workers of an environment, and says what is wrong with it before anything is started.

`trivet env install` makes plain virtual environments, each for one environment and mostly of its name. What is in one is read from
the metadata of its packages. A directory whose name begins with a dot is being built or removed.
"""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import Version

from trivet.config.layout import VENVS
from trivet.config.schema.environment import EnvConfig
from trivet.dependencies import InstalledPackages
from trivet.environments.apis.load import LIBRARY, require_installed
from trivet.errors import EnvironmentLoadError

OWN = "trivet"
"""Names the interpreter that runs trivet itself."""
AUTO = "auto"
WORKER_SOURCE = Path(__file__).parents[2] / "worker_distribution"
"""The directory that an installer builds `trivet-worker` from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentVenv:
    """A virtual environment that has an environment."""

    path: Path

    @property
    def name(self) -> str:
        """The name that a configuration uses."""
        return self.path.name

    @property
    def python(self) -> Path:
        """The interpreter."""
        return self.path / "bin" / "python"

    def packages(self) -> InstalledPackages:
        """Return the packages in it, its own first, then those of editable installations."""
        sites = list(self.path.glob("lib/python*/site-packages"))
        lines = [line for site in sites for file in site.glob("*.pth") for line in file.read_text().splitlines()]
        return InstalledPackages([*map(str, sites), *(line for line in lines if line.startswith("/") and Path(line).is_dir())])

    def version_of(self, package: str) -> str:
        """Return the version of an installed package, empty when there is none."""
        found = self.packages().find(package)
        return found.version if found is not None else ""

    def describe(self) -> str:
        """Return the name and the versions in one line."""
        python = re.search(r"^version(?:_info)? = (\S+)", (self.path / "pyvenv.cfg").read_text(), re.MULTILINE)
        verifiers = self.version_of(LIBRARY) or "not installed"
        return f"{self.name} (Python {python[1] if python else '?'}, verifiers {verifiers})"


def find_venvs(directory: Path) -> list[EnvironmentVenv]:
    """Return the virtual environments in `directory`, sorted by name."""
    found = [path.parent for path in directory.glob("*/pyvenv.cfg")]
    return [EnvironmentVenv(path=path) for path in sorted(found) if not path.name.startswith(".")]


def find_venvs_of(env_id: str, directory: Path) -> list[EnvironmentVenv]:
    """Return the virtual environment named after an environment, or else all that have a package of its name."""
    name = canonicalize_name(env_id.rpartition("/")[2])
    venvs = find_venvs(directory)
    return [venv for venv in venvs if venv.name == name] or [venv for venv in venvs if venv.version_of(name)]


def find_venv_directory(environ: Mapping[str, str] = os.environ, *, prefix: str = sys.prefix) -> Path:
    """Return the directory of virtual environments: of the project that trivet is installed in, or else of this user.

    A checkout and a workspace have theirs, in `.trivet/venvs` beside the `.venv` that runs this: another project's environments are
    not mixed in, the working directory does not matter, and making `.venv` anew loses nothing. The variable `TRIVET_VENVS` names
    another directory.
    """
    if named := environ.get(VENVS):
        return Path(named).absolute()
    project = Path(prefix).parent
    if (project / "pyproject.toml").is_file():
        return project / ".trivet" / "venvs"
    return Path(environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "trivet" / "venvs"


def find_interpreter(env: EnvConfig) -> str:
    """Return the path of the interpreter for `env`; empty for trivet's own.

    Raises:
        EnvironmentLoadError: `env.venv` names no virtual environment, several have the environment, or the environment has another
            version than `env.id` asks for.
    """
    venv = _find_venv(env)
    python = "" if venv is None else str(venv.python)
    if env.version is None:
        return python
    if venv is None:
        require_installed(env.package)
    package = (InstalledPackages() if venv is None else venv.packages()).find(env.package.rpartition("/")[2])
    if package is None or Version(package.version) != env.version:
        found = (
            f"{package.version} is installed" if package else "no package of that name, which would tell its own, is installed"
        )
        raise EnvironmentLoadError(
            f"env.id = {env.id!r} asks for version {env.version}, and {found} ({python or 'the Python of trivet'}); install it: "
            f"uv run trivet env install {env.id}, or write env.id = {env.package!r}"
        )
    return python


def _find_venv(env: EnvConfig) -> EnvironmentVenv | None:
    if env.venv == OWN:
        return None
    if os.sep in env.venv:
        venv = EnvironmentVenv(path=Path(env.venv).expanduser().absolute())
        named = f"env.venv = {env.venv!r} of environment {env.label!r}"
        if not venv.python.is_file():
            raise EnvironmentLoadError(f"{named} is no virtual environment: no {venv.python}")
        if not venv.version_of("trivet-worker") and not venv.version_of("trivet"):
            raise EnvironmentLoadError(
                f"{named} has no trivet-worker; install it with: uv pip install --python {venv.python} {WORKER_SOURCE}"
            )
        return venv
    directory = find_venv_directory()
    if env.venv == AUTO:
        found = find_venvs_of(env.package, directory)
        if len(found) > 1:
            names = " and ".join(venv.name for venv in found)
            raise EnvironmentLoadError(
                f"environment {env.id!r} is in {names}: name one with env.venv, or remove it from the others"
            )
        return found[0] if found else None
    venvs = {venv.name: venv for venv in find_venvs(directory)}
    if env.venv not in venvs:
        raise EnvironmentLoadError(
            f"env.venv = {env.venv!r} of environment {env.label!r} is not there; virtual environments: "
            f"{', '.join(venvs) or 'none'}. Make it with: uv run trivet env install {env.id} --venv {env.venv}"
        )
    return venvs[env.venv]


def require_environment(env: EnvConfig) -> None:
    """Check that `env` can be started, without starting anything.

    Raises:
        EnvironmentLoadError: its virtual environment or its package is not there; the message says how to get it.
    """
    if not find_interpreter(env):
        require_installed(env.package)


def describe_interpreter(env: EnvConfig) -> str:
    """Return in one line where the workers of `env` run, and with which versions."""
    venv = _find_venv(env)
    if venv is not None and venv.path.parent == find_venv_directory():
        return f"virtual environment {venv.describe()}"
    package = (InstalledPackages() if venv is None else venv.packages()).find(LIBRARY)
    where = "the Python of trivet" if venv is None else venv.python
    return f"{where}, verifiers {package.version if package else 'not installed'}"
