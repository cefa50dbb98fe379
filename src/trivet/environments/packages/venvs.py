"""Finds the virtual environments that `trivet env install` makes: plain ones, each for one environment and mostly of its name.

What is in one is read from the metadata of its packages. A directory whose name begins with a dot is being built or removed.
"""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from trivet.config.layout import VENVS
from trivet.dependencies import InstalledPackages


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
        """Return the packages in it, those of editable installations too."""
        return InstalledPackages(package_directories(self.path))

    def version_of(self, package: str) -> str:
        """Return the version of an installed package, empty when there is none."""
        found = self.packages().find(package)
        return found.version if found is not None else ""

    def describe(self) -> str:
        """Return the name and the versions in one line."""
        python = re.search(r"^version(?:_info)? = (\S+)", (self.path / "pyvenv.cfg").read_text(), re.MULTILINE)
        return (
            f"{self.name} (Python {python[1] if python else '?'}, verifiers {self.version_of('verifiers') or 'not installed'})"
        )


def package_directories(venv: Path) -> list[str]:
    """Return the directories of packages of a virtual environment: its own first, then those of editable installations."""
    sites = list(venv.glob("lib/python*/site-packages"))
    lines = [line for site in sites for file in site.glob("*.pth") for line in file.read_text().splitlines()]
    return [*map(str, sites), *(line for line in lines if line.startswith("/") and Path(line).is_dir())]


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
