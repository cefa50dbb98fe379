"""Installs and removes packages with uv or pip, under constraints that keep what trivet itself runs on.

`install_under_constraints` first asks the tool for a dry run: a conflict is refused before anything changes. The tools build and
fetch everything before they replace a package, so an installation that fails leaves what was there.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from packaging.utils import canonicalize_name

from trivet.dependencies import PROJECT, InstalledPackage
from trivet.errors import ConfigError, DependencyError

_DEPENDS = re.compile(
    r"(?:all versions of )?(?P<package>[A-Za-z0-9][\w.-]*)(?:\[[^\]]*\])?(?:\s?[=<>!~]+\S+|\s\d\S*)? depends? on "
    r"(?P<name>[A-Za-z0-9][\w.-]*?)(?:\[[^\]]*\])?\s?(?P<specifier>[=<>!~]=?[^\s;]+)"
)
"""Finds `PACKAGE==VERSION depends on NAME==VERSION` (uv) and `PACKAGE VERSION depends on NAME==VERSION` (pip)."""

_REMEDY = (
    "Ask the author of the package to allow the version that trivet runs on. Until then it can be installed in a Python project "
    "of its own, but not trained on with this installation"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Installer:
    """The tool that changes the packages of one Python."""

    install: tuple[str, ...]
    """The command up to the requirements."""
    uninstall: tuple[str, ...]
    """The command up to the names. It asks nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """A package that requires another version of what trivet runs on."""

    package: str
    requirement: str
    """The requirement as its author wrote it: `msgspec==0.19.0`."""
    name: str
    """The package that both want."""


def choose_installer(python: str = sys.executable) -> Installer:
    """Return the commands of uv if it is on PATH, else those of pip.

    Raises:
        ConfigError: there is neither.
    """
    if uv := shutil.which("uv"):
        return Installer(
            install=(uv, "pip", "install", "--python", python), uninstall=(uv, "pip", "uninstall", "--python", python)
        )
    pip = (python, "-P", "-m", "pip")
    found = subprocess.run([*pip, "--version"], capture_output=True, check=False, stdin=subprocess.DEVNULL)
    if found.returncode != 0:
        raise ConfigError(f"neither uv on PATH nor pip in {python} was found, one of which installs packages; install uv")
    return Installer(install=(*pip, "install"), uninstall=(*pip, "uninstall", "--yes"))


def constraint_lines(packages: Mapping[str, InstalledPackage]) -> str:
    """Return a constraints file that pins every package to its installed version."""
    return "".join(f"{name}=={package.version}\n" for name, package in packages.items())


def install_under_constraints(source: Sequence[str], *, installer: Installer, project: Mapping[str, InstalledPackage]) -> int:
    """Install `source` with its dependencies, and change no version of `project`.

    Args:
        source: a requirement, or `-e` and a directory.
        project: what trivet runs on, by canonical name.

    Returns:
        The tool's exit code. If it is not 0, what was installed is still there, and the tool has said why.

    Raises:
        DependencyError: a dependency of `source` needs another version of what trivet runs on; nothing was changed.
    """
    with tempfile.NamedTemporaryFile("w", prefix="trivet-constraints-", suffix=".txt") as constraints:
        constraints.write(constraint_lines(project))
        constraints.flush()
        command = [*installer.install, "--constraint", constraints.name]
        planned = _capture([*command, "--dry-run", *source])
        if planned.returncode == 0:
            code = subprocess.run([*command, *source], check=False, stdin=subprocess.DEVNULL).returncode
            if code != 0:
                print(f"error: {source[-1]} was not installed; see the message above", file=sys.stderr)
            return code
    said = planned.stdout + planned.stderr
    if conflicts := find_conflicts(said, frozenset(project)):
        raise DependencyError(describe_conflicts(conflicts, source=source[-1], project=project))
    # Without constraints it can be installed: so they are the reason, in words of the tool that find_conflicts does not know.
    if _capture([*installer.install, "--dry-run", *source]).returncode == 0:
        raise DependencyError(
            f"{_refusal(source[-1])}: it needs other versions of what trivet runs on. {_REMEDY}\n{said.strip()}"
        )
    print(said.strip(), file=sys.stderr)
    print(f"error: {source[-1]} cannot be installed, and nothing was changed; see the message above", file=sys.stderr)
    return planned.returncode


def find_conflicts(message: str, names: frozenset[str]) -> list[Conflict]:
    """Read from a failed dry run who wants another version of a constrained package.

    Args:
        message: what uv or pip printed.
        names: canonical names of what was constrained.
    """
    found: dict[Conflict, None] = {}
    for match in _DEPENDS.finditer(" ".join(message.split())):
        name = canonicalize_name(match["name"])
        # A requirement of one constrained package for another explains the conflict, and is none itself.
        if name in names and canonicalize_name(match["package"]) not in names:
            requirement = f"{match['name']}{match['specifier'].rstrip('.,')}"
            found[Conflict(package=match["package"], requirement=requirement, name=name)] = None
    return list(found)


def describe_conflicts(conflicts: Sequence[Conflict], *, source: str, project: Mapping[str, InstalledPackage]) -> str:
    """Return the error that names each package, both requirements, and what a user can do."""
    reasons = [
        f"{each.package} requires {each.requirement}, but trivet runs on {each.name} {project[each.name].version} "
        f"({describe_requirer(each.name, project)})"
        for each in conflicts
    ]
    return f"{_refusal(source)}: {'; '.join(reasons)}. {_REMEDY}"


def describe_requirer(name: str, project: Mapping[str, InstalledPackage]) -> str:
    """Return which package of the project requires `name`, and how; trivet itself when it does."""
    for package in sorted(project.values(), key=lambda package: package.name != PROJECT):
        for requirement in package.active_requirements(extras=package.extras if package.name == PROJECT else frozenset()):
            if canonicalize_name(requirement.name) == name:
                return f"{package.name} requires {requirement.name}{requirement.specifier}"
    return "trivet requires it"


def uninstall(name: str, *, installer: Installer) -> int:
    """Remove one package and leave its dependencies; returns the tool's exit code."""
    return subprocess.run([*installer.uninstall, name], check=False, stdin=subprocess.DEVNULL).returncode


def _refusal(source: str) -> str:
    return f"{source} cannot be installed beside trivet, and nothing was changed"


def _capture(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
