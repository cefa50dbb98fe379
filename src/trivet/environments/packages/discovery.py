"""Finds the installed environment packages from metadata and source text, and imports them in their own interpreter to check them.

A package counts as an environment package if trivet itself does not depend on it, and if one of its modules defines or imports
`load_environment`, or the package requires verifiers. The requirement also finds a package that is broken or that re-exports the
function by `*`. verifiers itself has a function of that name, but is no environment package.
"""

import importlib.util
import json
import os
import subprocess
import symtable
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path, PurePath
from urllib.parse import unquote, urlsplit

from packaging.utils import canonicalize_name

from trivet.dependencies import InstalledPackage, InstalledPackages, find_project_packages
from trivet.environments.apis.load import LIBRARY, LOADER
from trivet.environments.settings import worker_environment
from trivet.process.lifetime import module_command, tied_command

_MAX_SOURCE_BYTES = 4 << 20
"""A larger module is not parsed. Sources of environments have a few thousand lines; generated tables may have millions."""
_IMPORT_TIMEOUT_S = 120.0
"""Longest time to import all modules of one process. verifiers alone takes 5 to 20 s on two busy cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageOrigin:
    """The origin of an installed package, as its `direct_url.json` (PEP 610) records it."""

    kind: str
    """`editable`, `directory`, `wheel`, `archive`, `index`, or a version control system such as `git`."""
    location: str = ""
    """A path, or an address without its credentials; empty for an index."""

    def describe(self, *, base: Path) -> str:
        """Return the kind and the location in one line, relative where it is a path below `base`."""
        is_below = self.location.startswith("/") and Path(self.location).is_relative_to(base)
        location = str(Path(self.location).relative_to(base)) if is_below else self.location
        return f"{self.kind} {location}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentPackage:
    """An installed package that has an environment."""

    name: str
    version: str
    module: str
    """The module to import; its name with dashes is the `id` in a configuration."""
    origin: PackageOrigin


def find_environments(installed: InstalledPackages | None = None) -> list[EnvironmentPackage]:
    """Return the installed environment packages, sorted by name."""
    installed = installed or InstalledPackages()
    project = find_project_packages(installed)
    environments: list[EnvironmentPackage] = []
    for name, package in sorted(installed.find_all().items()):
        if name in project or name == LIBRARY:
            continue
        modules = list(_module_names(package))
        files = ((module, _source_file(module, search_path=installed.search_path)) for module in modules)
        with_loader = (module for module, file in files if file is not None and binds_loader(file.read_text(errors="replace")))
        requires_library = any(canonicalize_name(required.name) == LIBRARY for required in package.active_requirements())
        module = next(with_loader, modules[0] if requires_library else None)
        if module is not None:
            origin = read_origin(package.distribution.read_text("direct_url.json"))
            environments.append(EnvironmentPackage(name=package.name, version=package.version, module=module, origin=origin))
    return environments


def read_origin(direct_url: str | None) -> PackageOrigin:
    """Read the text of a `direct_url.json`. An installer writes no such file for a package from an index."""
    if not direct_url:
        return PackageOrigin(kind="index")
    content = json.loads(direct_url)
    parts = urlsplit(str(content.get("url", "")))
    # An address may carry a password before the @: it must not be printed.
    location = unquote(parts.path) if parts.scheme == "file" else f"{parts.scheme}://{parts.hostname or ''}{parts.path}"
    if "dir_info" in content:
        is_editable = content["dir_info"].get("editable", False)
        return PackageOrigin(kind="editable" if is_editable else "directory", location=location)
    if "vcs_info" in content:
        vcs = content["vcs_info"]
        return PackageOrigin(kind=str(vcs.get("vcs", "git")), location=f"{location}@{str(vcs.get('commit_id', ''))[:12]}")
    return PackageOrigin(kind="wheel" if location.endswith(".whl") else "archive", location=location)


def binds_loader(source: str) -> bool:
    """Return whether a module's source binds `load_environment` at its top level: defines, imports or assigns it.

    Return True for a source with a syntax error that contains the name.
    """
    if LOADER not in source:
        return False
    try:
        symbol = symtable.symtable(source, "<module>", "exec").lookup(LOADER)
    except KeyError:
        return False
    except (SyntaxError, ValueError):
        return True
    return symbol.is_assigned() or symbol.is_imported()


def _module_names(package: InstalledPackage) -> Iterator[str]:
    """Yield the top-level modules that a package may have: first the module with its name, which verifiers imports."""
    conventional = canonicalize_name(package.name).replace("-", "_")
    yield conventional
    files: list[PurePath] = list(package.distribution.files or ())
    origin = read_origin(package.distribution.read_text("direct_url.json"))
    if origin.kind == "editable":  # its metadata does not list its sources, which stay in their directory
        for root in (Path(origin.location), Path(origin.location) / "src"):
            files += [path.relative_to(root) for pattern in ("*.py", "*/__init__.py") for path in sorted(root.glob(pattern))]
    for file in files:
        is_package = len(file.parts) == 2 and file.name == "__init__.py"
        is_module = len(file.parts) == 1 and file.suffix == ".py"
        module = file.parts[0].removesuffix(".py")
        if (is_package or is_module) and module != conventional:
            yield module


def _source_file(module: str, *, search_path: Sequence[str] | None) -> Path | None:
    try:
        # The first form also uses the finders that some editable installs add to this interpreter.
        spec = importlib.util.find_spec(module) if search_path is None else PathFinder.find_spec(module, list(search_path))
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    file = Path(spec.origin)
    return file if file.is_file() and file.stat().st_size <= _MAX_SOURCE_BYTES else None


def check_imports(
    modules: Sequence[str], *, python: str = sys.executable, timeout_s: float = _IMPORT_TIMEOUT_S
) -> dict[str, str]:
    """Return the problem of each module in one line, by module; "" for a module that loads.

    The modules are imported in one process, so common dependencies are imported once. If a module ends that process or exceeds the
    time, that is its problem, and a new process imports the remaining modules.

    Args:
        python: the interpreter of the modules.
    """
    problems: dict[str, str] = {}
    while remaining := [module for module in modules if module not in problems]:
        command = module_command("trivet.environments.workers.main", "--check", *remaining, python=python)
        try:
            done = subprocess.run(
                tied_command(command),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout_s,
                check=False,
                env=worker_environment(os.environ, python=python),
                start_new_session=True,
            )
            answers, last_line = done.stdout, done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            ending = f"importing it ended the process with exit code {done.returncode}{last_line and f': {last_line}'}"
        except subprocess.TimeoutExpired as exc:
            answers, ending = exc.stdout or b"", f"importing it took more than {timeout_s:.0f} s"
        problems |= dict(json.loads(line) for line in answers.splitlines())
        if (module := next((module for module in remaining if module not in problems), None)) is not None:
            problems[module] = ending
    return problems
