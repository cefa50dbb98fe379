"""Finds out what `trivet env install` is asked to install, before anything is made: the package, its module, its verifiers API.

The package alone is fetched or built into a temporary directory, without its dependencies, and its metadata and sources are read
there. None of its code is imported; building a package from its sources runs its build.
"""

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import httpx
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from trivet.config.environment_ids import EnvironmentId, parse_environment_id
from trivet.dependencies import InstalledPackage, InstalledPackages
from trivet.environments.packages.discovery import EnvironmentPackage, find_environments
from trivet.errors import ConfigError
from trivet.process.proxies import PROXY_ERRORS
from trivet.tools.installer import Installer

HUB = "https://hub.primeintellect.ai"
"""The environments hub. The packages of an owner are an index of their own, at /OWNER/simple/."""

_HUB_TIMEOUT_S = 10.0
"""For each of connecting and answering. The page of a package is small."""
_HUB_NAME = re.compile(r"(?P<owner>[A-Za-z0-9][\w.-]*)/(?P<package>[A-Za-z0-9][\w.-]*)")
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:\[[A-Za-z0-9,._-]+\])?(?:[=<>!~]=?[A-Za-z0-9.*,=<>!~]+)?")
_FIRST_OF_V1 = Version("0.4.dev0")
_V1_IMPORT = re.compile(r"^\s*(?:(?:import|from)\s+verifiers\.v1\b|from\s+verifiers\s+import\s+.*\bv1\b)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageSource:
    """A package to install, in the words of an installer."""

    words: tuple[str, ...]
    """A requirement, a wheel, or `-e` and a directory."""
    index: str = ""
    """An index to look in as well, where the package has an owner on the hub."""
    version: Version | None = None
    """The version that is asked for of a directory, which has only one; None for any."""

    @property
    def index_words(self) -> tuple[str, ...]:
        """The option that names the index."""
        return ("--extra-index-url", self.index) if self.index else ()

    def describe(self) -> str:
        """Return what is fetched from where, in one line."""
        return " ".join(self.words) + (f" from {self.index}" if self.index else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedPackage:
    """A package as it was found before its installation."""

    environment: EnvironmentPackage
    api: str
    """Generation of the verifiers API that it is written for: `v0` or `v1`."""


def choose_source(what: str, *, folder: Path, is_index_allowed: bool) -> PackageSource:
    """Return the package that `what` names: a directory, one of `folder`, a wheel, one of the hub, or one of the package index.

    Args:
        is_index_allowed: a name that is none of the first may be that of a package to download.

    Raises:
        ConfigError: it is a path without a package, a name of nothing that is here, or nothing that could be one.
    """
    try:
        named = parse_environment_id(what)
    except ValueError:  # a path, a wheel, or another requirement
        named = EnvironmentId(package=what)
    for directory in (Path(what), folder / named.package, folder / named.name.replace("-", "_")):
        if (directory / "pyproject.toml").is_file():
            return PackageSource(words=("-e", str(directory.absolute())), version=named.version)
    if what.endswith(".whl") and Path(what).is_file():
        return PackageSource(words=(str(Path(what).absolute()),))
    if what.startswith((".", "/", "~")) or Path(what).is_dir():
        raise ConfigError(f"{what} has no pyproject.toml: it is no package; `trivet env init NAME` writes one")
    requirement = what if named.package == what else f"{named.name}=={named.version}" if named.version else named.name
    if hub := _HUB_NAME.fullmatch(named.package):
        word = requirement if named.version else hub["package"]
        return PackageSource(words=(word,), index=f"{HUB}/{hub['owner']}/simple/")
    there = ", ".join(sorted(path.parent.name for path in folder.glob("*/pyproject.toml"))) or "which has none"
    if _REQUIREMENT.fullmatch(requirement) is None:
        raise ConfigError(f"{what!r} is neither a directory, nor one of {folder}/ ({there}), nor a package's name")
    if not is_index_allowed:
        raise ConfigError(
            f"{what!r} is none of {folder}/ ({there}). To download the package of that name from the package index, whoever "
            f"published it there, add --from-index; OWNER/NAME takes one from the hub"
        )
    return PackageSource(words=(requirement,))


def require_on_hub(source: PackageSource) -> None:
    """Check that the hub answers and has the package, where it is one of the hub. Anything else is left to the installer.

    An installer that cannot reach an owner's index, or does not find the package in it, goes on to the package index, where
    anybody may have published another package of that name.

    Raises:
        ConfigError: the hub cannot be reached, or has no such package.
    """
    if not source.index:
        return
    name = canonicalize_name(Requirement(source.words[0]).name)
    try:
        answer = httpx.get(f"{source.index}{name}/", timeout=_HUB_TIMEOUT_S, follow_redirects=True)
    except (httpx.HTTPError, *PROXY_ERRORS) as exc:
        raise ConfigError(
            f"the environments hub cannot be reached at {source.index} ({exc or type(exc).__name__}), and nothing was changed; "
            "check the network and the proxy (HTTPS_PROXY), or install from a directory or a wheel: uv run trivet env install PATH"
        ) from exc
    if answer.status_code in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE):
        raise ConfigError(f"{source.index} has no package {name!r}, and nothing was changed; check owner and name")


def inspect(source: PackageSource, *, installer: Installer) -> InspectedPackage:
    """Fetch or build the package alone, and read what it is.

    Raises:
        ConfigError: it cannot be fetched or built, or is no environment.
    """
    with tempfile.TemporaryDirectory(prefix="trivet-env-") as directory:
        words = [word for word in source.words if word != "-e"]
        done = installer.run([*source.index_words, "--no-deps", "--target", directory, *words])
        if done.returncode != 0:
            message = (done.stderr or done.stdout).strip()
            raise ConfigError(f"{source.describe()} cannot be fetched or built, and nothing was changed:\n{message}")
        installed = InstalledPackages([directory])
        packages = installed.find_all()
        environments = find_environments(installed)
        if len(packages) != 1 or len(environments) != 1:
            raise ConfigError(
                f"{source.describe()} is no environment: no module of it has load_environment, and it does not require verifiers"
            )
        [package] = packages.values()
        if source.version is not None and Version(package.version) != source.version:
            raise ConfigError(
                f"{source.describe()} is version {package.version} and not {source.version}, and nothing was changed; ask for the "
                "version that is there, or for a package that is elsewhere"
            )
        sources = [path.read_text(errors="replace") for path in Path(directory).rglob("*.py")]
        return InspectedPackage(environment=environments[0], api=api_of(package, sources))


def api_of(package: InstalledPackage, sources: Sequence[str]) -> str:
    """Return the generation of the API that a package needs: `v1` if it requires verifiers 0.4 or imports verifiers.v1."""
    specifiers = [
        specifier
        for requirement in package.active_requirements()
        if requirement.name == "verifiers"
        for specifier in Requirement(str(requirement)).specifier
    ]
    lower = [
        Version(specifier.version.removesuffix(".*"))
        for specifier in specifiers
        if specifier.operator in (">=", ">", "==", "~=")
    ]
    upper = [Version(specifier.version.removesuffix(".*")) for specifier in specifiers if specifier.operator in ("<", "<=")]
    if any(version >= _FIRST_OF_V1 for version in lower):
        return "v1"
    if any(version <= Version("0.4") for version in upper):
        return "v0"
    return "v1" if any(_V1_IMPORT.search(text) for text in sources) else "v0"
