"""Finds the interpreter that runs the workers of an environment, and reports problems before anything is started.

`trivet env install` makes plain virtual environments: each is for one environment, and usually has its name. Which packages one has
is read from the packages' metadata. A directory whose name begins with a dot is being built or removed.
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

TRIVET_VENV = "trivet"
"""The value of `env.venv` for the interpreter that runs trivet itself."""
AUTO = "auto"
"""The value of `env.venv` for the virtual environment that has the environment's package, or else trivet's interpreter."""
WORKER_SOURCE = Path(__file__).parents[2] / "worker_distribution"
"""The directory that an installer builds `trivet-worker` from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentVenv:
    """A virtual environment in which an environment is installed."""

    path: Path

    @property
    def name(self) -> str:
        """The name that `env.venv` of a configuration gives."""
        return self.path.name

    @property
    def python(self) -> Path:
        """The path of the interpreter."""
        return self.path / "bin" / "python"

    def packages(self) -> InstalledPackages:
        """Return its packages: first those in its site-packages, then those of editable installations."""
        sites = list(self.path.glob("lib/python*/site-packages"))
        lines = [line for site in sites for file in site.glob("*.pth") for line in file.read_text().splitlines()]
        return InstalledPackages([*map(str, sites), *(line for line in lines if line.startswith("/") and Path(line).is_dir())])

    def version_of(self, package: str) -> str:
        """Return the version of an installed package; empty when it is not installed."""
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
    """Return the virtual environment with the name of an environment, or else all in which a package of that name is installed."""
    name = canonicalize_name(env_id.rpartition("/")[2])
    venvs = find_venvs(directory)
    return [venv for venv in venvs if venv.name == name] or [venv for venv in venvs if venv.version_of(name)]


def find_venv_directory(environ: Mapping[str, str] = os.environ, *, prefix: str = sys.prefix) -> Path:
    """Return the directory of virtual environments: that of the project in which trivet is installed, or else that of this user.

    The directory of a checkout or workspace is `.trivet/venvs` next to the `.venv` that runs this process. So projects do not share
    environments, the working directory does not matter, and making `.venv` anew loses nothing. The variable `TRIVET_VENVS` names
    another directory.

    Args:
        prefix: the virtual environment that runs this process.
    """
    if named := environ.get(VENVS):
        return Path(named).absolute()
    project = Path(prefix).parent
    if (project / "pyproject.toml").is_file():
        return project / ".trivet" / "venvs"
    return Path(environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "trivet" / "venvs"


def find_interpreter(env: EnvConfig) -> str:
    """Return the path of the interpreter for `env`; empty for trivet's own interpreter.

    Raises:
        EnvironmentLoadError: `env.venv` names no virtual environment, several virtual environments have the environment, or its
            version is not the one that `env.id` names.
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
    """Return the virtual environment of `env`; None if it uses trivet's own interpreter."""
    if env.venv == TRIVET_VENV:
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
    """Check without starting anything that the interpreter and the package of `env` are installed.

    Raises:
        EnvironmentLoadError: its virtual environment or its package is missing; the message has the command that installs it.
    """
    if not find_interpreter(env):
        require_installed(env.package)


def describe_interpreter(env: EnvConfig) -> str:
    """Return in one line the interpreter of the workers of `env`, and its versions."""
    venv = _find_venv(env)
    if venv is not None and venv.path.parent == find_venv_directory():
        return f"virtual environment {venv.describe()}"
    package = (InstalledPackages() if venv is None else venv.packages()).find(LIBRARY)
    where = "the Python of trivet" if venv is None else venv.python
    return f"{where}, verifiers {package.version if package else 'not installed'}"
