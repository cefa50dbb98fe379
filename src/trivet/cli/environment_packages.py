"""Finds, inspects and installs environment packages for `trivet env`, each into a virtual environment of its own.

The virtual environment that trivet runs in never changes. Before anything is made, the package alone is fetched or built into a
temporary directory, without its dependencies, and its metadata and sources are read there; none of its code is imported. An
installation builds a new virtual environment under a temporary name and then renames it into place.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import httpx
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from trivet.config.schema.environment import EnvironmentId, parse_environment_id
from trivet.dependencies import InstalledPackage, InstalledPackages
from trivet.environments.packages.discovery import EnvironmentPackage, find_environments
from trivet.environments.packages.interpreters import WORKER_SOURCE, EnvironmentVenv, find_venvs, find_venvs_of
from trivet.errors import ConfigError, DependencyError
from trivet.process.lock import FileLock
from trivet.process.proxies import PROXY_ERRORS

HUB = "https://hub.primeintellect.ai"
"""The environments hub. Each owner has a package index at /OWNER/simple/."""

_HUB_TIMEOUT_S = 10.0
"""Longest wait for the connection, and for the answer. The page of a package is small."""
_HUB_ID = re.compile(r"(?P<owner>[A-Za-z0-9][\w.-]*)/(?P<package>[A-Za-z0-9][\w.-]*)")
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:\[[A-Za-z0-9,._-]+\])?(?:[=<>!~]=?[A-Za-z0-9.*,=<>!~]+)?")
_FIRST_V1_VERSION = Version("0.4.dev0")
_V1_IMPORT = re.compile(r"^\s*(?:(?:import|from)\s+verifiers\.v1\b|from\s+verifiers\s+import\s+.*\bv1\b)", re.MULTILINE)
_DEPENDENCY_LINE = re.compile(
    r"(?:all versions of )?(?P<package>[A-Za-z0-9][\w.-]*)(?:\[[^\]]*\])?(?:\s?[=<>!~]+\S+|\s\d\S*)? depends? on "
    r"(?P<name>[A-Za-z0-9][\w.-]*?)(?:\[[^\]]*\])?\s?(?P<specifier>[=<>!~]=?[^\s;]+)"
)
"""Finds `PACKAGE==VERSION depends on NAME==VERSION` (uv) and `PACKAGE VERSION depends on NAME==VERSION` (pip)."""
RELEASES = {"v0": "verifiers>=0.3,<0.4", "v1": "verifiers>=0.4"}
"""The required releases of verifiers, by the generation of the API that an environment uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageSource:
    """A package to install."""

    words: tuple[str, ...]
    """Arguments of the installer: a requirement, a wheel, or `-e` and a directory."""
    index: str = ""
    """The index of the package's owner on the hub, used besides the default index; empty for other packages."""
    version: Version | None = None
    """The version that the package in a directory must have; None for any."""

    @property
    def index_words(self) -> tuple[str, ...]:
        """The installer's option for the index."""
        return ("--extra-index-url", self.index) if self.index else ()

    def describe(self) -> str:
        """Return the arguments and the index as text on one line."""
        return " ".join(self.words) + (f" from {self.index}" if self.index else "")


def choose_source(name: str, *, folder: Path, is_index_allowed: bool) -> PackageSource:
    """Return the package that the user's argument stands for.

    Args:
        name: a directory, a package in `folder`, a wheel, OWNER/NAME of the hub, or a requirement for the package index.
        folder: the folder of the user's environments.
        is_index_allowed: True if a name that is none of the others may be downloaded from the package index.

    Raises:
        ConfigError: the argument is a path without a package, a name that does not exist here, or no valid name.
    """
    try:
        named = parse_environment_id(name)
    except ValueError:  # a path, a wheel, or a requirement in another form
        named = EnvironmentId(package=name)
    for directory in (Path(name), folder / named.package, folder / named.name.replace("-", "_")):
        if (directory / "pyproject.toml").is_file():
            return PackageSource(words=("-e", str(directory.absolute())), version=named.version)
    if name.endswith(".whl") and Path(name).is_file():
        return PackageSource(words=(str(Path(name).absolute()),))
    if name.startswith((".", "/", "~")) or Path(name).is_dir():
        raise ConfigError(f"{name} has no pyproject.toml: it is no package; `trivet env init NAME` writes one")
    requirement = name if named.package == name else f"{named.name}=={named.version}" if named.version else named.name
    if hub := _HUB_ID.fullmatch(named.package):
        word = requirement if named.version else hub["package"]
        return PackageSource(words=(word,), index=f"{HUB}/{hub['owner']}/simple/")
    there = ", ".join(sorted(path.parent.name for path in folder.glob("*/pyproject.toml"))) or "which has none"
    if _REQUIREMENT.fullmatch(requirement) is None:
        raise ConfigError(f"{name!r} is neither a directory, nor one of {folder}/ ({there}), nor a package's name")
    if not is_index_allowed:
        raise ConfigError(
            f"{name!r} is none of {folder}/ ({there}). To download the package of that name from the package index, whoever "
            f"published it there, add --from-index; OWNER/NAME takes one from the hub"
        )
    return PackageSource(words=(requirement,))


def require_on_hub(source: PackageSource) -> None:
    """Check that the hub has the package, if the package comes from the hub.

    An installer that cannot reach the owner's index, or does not find the package there, continues with the default index, where
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


def inspect(source: PackageSource) -> tuple[EnvironmentPackage, str]:
    """Fetch or build the package without its dependencies, and read its metadata and sources.

    Returns the package, and the generation of the verifiers API that it uses: `v0` or `v1`.

    Raises:
        ConfigError: it cannot be fetched or built, or is no environment.
    """
    with tempfile.TemporaryDirectory(prefix="trivet-env-") as directory:
        words = [word for word in source.words if word != "-e"]
        done = run_installer([*source.index_words, "--no-deps", "--target", directory, *words])
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
        return environments[0], detect_api(package, sources)


def detect_api(package: InstalledPackage, sources: Sequence[str]) -> str:
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
    if any(version >= _FIRST_V1_VERSION for version in lower):
        return "v1"
    if any(version <= Version("0.4") for version in upper):
        return "v0"
    return "v1" if any(_V1_IMPORT.search(text) for text in sources) else "v0"


def install(source: PackageSource, *, directory: Path, venv: str | None) -> tuple[EnvironmentVenv, EnvironmentPackage, str]:
    """Install a package. Return its virtual environment, the package, and its generation of the verifiers API.

    Args:
        directory: the directory of all virtual environments.
        venv: the name of the virtual environment; None uses the environment's id.

    Raises:
        ConfigError: the package cannot be fetched or built, is no environment, or `venv` contains another environment.
        DependencyError: its requirements cannot be installed together. An earlier installation stays as it was.
    """
    package, api = inspect(source)
    made = EnvironmentVenv(path=directory / (venv or package.module.replace("_", "-")))
    with _lock(directory):
        if venv is not None and made in find_venvs(directory) and not made.version_of(package.name):
            raise ConfigError(f"virtual environment {venv!r} has another environment; remove that, or choose another name")
        built, replaced = directory / f".{made.name}.new", directory / f".{made.name}.old"
        try:
            for leftover in (built, replaced):  # of an installation that was killed
                shutil.rmtree(leftover, ignore_errors=True)
            _build(built, source, RELEASES[api])
            if made.path.exists():
                made.path.rename(replaced)
            built.rename(made.path)
        finally:
            for leftover in (built, replaced):
                shutil.rmtree(leftover, ignore_errors=True)
    return made, package, api


def remove(env_id: str, *, directory: Path) -> None:
    """Remove an environment with its virtual environment.

    Raises:
        ConfigError: no virtual environment contains it, or several do.
    """
    with _lock(directory):
        found = find_venvs_of(env_id, directory)
        if len(found) != 1:
            where = "no virtual environment" if not found else " and ".join(venv.name for venv in found)
            there = ", ".join(venv.name for venv in find_venvs(directory))
            raise ConfigError(f"{env_id} is in {where} of {directory}; virtual environments there: {there or 'none'}")
        shutil.rmtree(found[0].path)


def _lock(directory: Path) -> FileLock:
    """Return the lock of the directory of virtual environments, which is made, and hidden from git, if it does not exist."""
    directory.mkdir(parents=True, exist_ok=True)
    ignored = directory.parent / ".gitignore"
    if directory.parent.name == ".trivet" and not ignored.exists():
        ignored.write_text("*\n")
    return FileLock(directory / ".lock", what=f"the directory of virtual environments {str(directory)!r}")


def _build(path: Path, source: PackageSource, constraint: str) -> None:
    """Make a virtual environment in `path` and install the package into it, with the part of trivet that runs environments.

    Args:
        constraint: the releases of verifiers that may be installed.
    """
    uv = shutil.which("uv")
    # It must be relocatable, because it is renamed: its scripts must not contain the temporary path.
    command = [uv, "venv", "--quiet", "--relocatable", "--python", sys.executable] if uv else [sys.executable, "-m", "venv"]
    done = subprocess.run([*command, str(path)], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise ConfigError(f"no virtual environment can be made in {path}: {(done.stderr or done.stdout).strip()}")
    with tempfile.NamedTemporaryFile("w", prefix="trivet-constraints-", suffix=".txt") as constraints:
        constraints.write(f"{constraint}\n")
        constraints.flush()
        words = [*source.index_words, "--constraint", constraints.name, str(WORKER_SOURCE), *source.words]
        done = run_installer(words, python=str(path / "bin" / "python"))
    if done.returncode != 0:
        message = (done.stdout + done.stderr).strip()
        reason = explain_conflicts(message, constraint) or message
        raise DependencyError(f"{source.describe()} cannot be installed: {reason}")


def run_installer(words: Sequence[str], *, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    """Run `pip install` with uv if it is on PATH, else with pip.

    The installer runs in an empty directory. Otherwise uv would apply the constraints and overrides of trivet's own project.

    Args:
        words: its arguments. Paths must be absolute.
        python: the interpreter for which packages are installed.

    Raises:
        ConfigError: neither uv nor pip was found.
    """
    if uv := shutil.which("uv"):
        install = [uv, "pip", "install", "--python", python, "--refresh-package", "trivet-worker"]
    else:
        pip = [python, "-P", "-m", "pip"]
        found = subprocess.run([*pip, "--version"], capture_output=True, check=False, stdin=subprocess.DEVNULL)
        if found.returncode != 0:
            raise ConfigError(f"neither uv on PATH nor pip in {python} was found, one of which installs packages; install uv")
        install = [*pip, "install"]
    with tempfile.TemporaryDirectory(prefix="trivet-install-") as empty_directory:
        return subprocess.run(
            [*install, *words], cwd=empty_directory, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )


def explain_conflicts(message: str, constraint: str) -> str:
    """Return the packages that require another version than `constraint` allows, as text; empty if the message names none.

    Args:
        message: what uv or pip printed.
        constraint: a requirement such as `verifiers>=0.3.1,<0.4`.
    """
    allowed = Requirement(constraint)
    found: dict[str, None] = {}
    for match in _DEPENDENCY_LINE.finditer(" ".join(message.split())):
        requirement = f"{match['name']}{match['specifier'].rstrip('.,')}"
        _, is_pin, version = requirement.partition("==")
        agrees = bool(is_pin) and allowed.specifier.contains(version)
        if canonicalize_name(match["name"]) == canonicalize_name(allowed.name) and not agrees:
            found[f"{match['package']} requires {requirement}, and it holds {constraint}"] = None
    return "; ".join(found)
