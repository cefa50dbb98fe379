"""Names the commands of uv or pip that install into a Python, and reads from their messages which requirements contradict."""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from trivet.errors import ConfigError

_DEPENDS = re.compile(
    r"(?:all versions of )?(?P<package>[A-Za-z0-9][\w.-]*)(?:\[[^\]]*\])?(?:\s?[=<>!~]+\S+|\s\d\S*)? depends? on "
    r"(?P<name>[A-Za-z0-9][\w.-]*?)(?:\[[^\]]*\])?\s?(?P<specifier>[=<>!~]=?[^\s;]+)"
)
"""Finds `PACKAGE==VERSION depends on NAME==VERSION` (uv) and `PACKAGE VERSION depends on NAME==VERSION` (pip)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installer:
    """The tool that changes the packages of one Python."""

    install: tuple[str, ...]
    """The command up to the requirements."""

    def run(self, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Install what `words` name, paths absolute. It runs outside of every project: uv applies the constraints and overrides of
        the project in its working directory, and those of trivet's would hold for the environment too.
        """
        with tempfile.TemporaryDirectory(prefix="trivet-install-") as nowhere:
            return subprocess.run(
                [*self.install, *words], cwd=nowhere, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """A package that requires another version of what a constraint holds."""

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
        return Installer(install=(uv, "pip", "install", "--python", python, "--refresh-package", "trivet-worker"))
    pip = (python, "-P", "-m", "pip")
    found = subprocess.run([*pip, "--version"], capture_output=True, check=False, stdin=subprocess.DEVNULL)
    if found.returncode != 0:
        raise ConfigError(f"neither uv on PATH nor pip in {python} was found, one of which installs packages; install uv")
    return Installer(install=(*pip, "install"))


def find_conflicts(message: str, constraints: Sequence[str]) -> list[Conflict]:
    """Read from a failed installation who wants another version of a constrained package.

    Args:
        message: what uv or pip printed.
        constraints: the requirements that hold, such as `msgspec==0.20` and `verifiers>=0.3.1,<0.4`.
    """
    holding = _by_name(constraints)
    found: dict[Conflict, None] = {}
    for match in _DEPENDS.finditer(" ".join(message.split())):
        name = canonicalize_name(match["name"])
        # A requirement of one constrained package for another explains the conflict, and is none itself.
        if name in holding and canonicalize_name(match["package"]) not in holding:
            requirement = f"{match['name']}{match['specifier'].rstrip('.,')}"
            if not _is_pin_within(requirement, holding[name]):
                found[Conflict(package=match["package"], requirement=requirement, name=name)] = None
    return list(found)


def _by_name(constraints: Sequence[str]) -> dict[str, str]:
    return {canonicalize_name(re.split(r"[=<>!~]", line)[0]): line for line in constraints}


def _is_pin_within(requirement: str, constraint: str) -> bool:
    """Return whether a pin such as `verifiers==0.3.1` agrees with a constraint such as `verifiers>=0.3.1,<0.4`."""
    _, is_pin, version = requirement.partition("==")
    return bool(is_pin) and Requirement(constraint).specifier.contains(version)


def describe_conflicts(conflicts: Sequence[Conflict], *, constraints: Sequence[str]) -> str:
    """Return which package requires what, and what holds in the virtual environment instead; empty without conflicts."""
    holding = _by_name(constraints)
    return "; ".join(
        f"{conflict.package} requires {conflict.requirement}, and it holds {holding[canonicalize_name(conflict.name)]}"
        for conflict in conflicts
    )
