"""The command `trivet env`: writes, installs, lists and removes environment packages.

It never changes a package that trivet itself runs on: `installer` holds those at their version, and `remove` refuses them.
"""

import argparse
import importlib.util
import keyword
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from packaging.utils import canonicalize_name

from trivet.dependencies import InstalledPackages, find_project_packages
from trivet.environments.packages.discovery import EnvironmentPackage, find_environments
from trivet.environments.packages.import_check import check_imports
from trivet.environments.packages.installed import LIBRARY
from trivet.errors import ConfigError
from trivet.tools.installer import choose_installer, install_under_constraints, uninstall

FOLDER = Path("environments")
_NAME = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*")
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:\[[A-Za-z0-9,._-]+\])?(?:[=<>!~]=?[A-Za-z0-9.*]+)?")
_NAME_OF_REQUIREMENT = re.compile(r"[\[=<>!~]")
_TEMPLATES = Path(__file__).with_name("templates")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this tool."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    init = actions.add_parser("init", help="write a new environment package that works")
    init.add_argument("name", metavar="NAME", help="its id, in lower case with dashes: my-env")
    init.add_argument("--path", type=Path, default=FOLDER, help="the folder of environments (default: environments)")
    install = actions.add_parser(
        "install", help="install an environment into this Python; what trivet runs on keeps its version"
    )
    install.add_argument(
        "what",
        metavar="NAME|PATH",
        help="a package's directory or wheel, its name in environments/, or a package to download",
    )
    install.add_argument("--path", type=Path, default=FOLDER, help="the folder of environments (default: environments)")
    actions.add_parser("list", help="show the installed environments: version, where each came from, whether it loads")
    remove = actions.add_parser("remove", help="uninstall an environment; its dependencies and its directory stay")
    remove.add_argument("name", metavar="NAME", help="its name as in `trivet env list`")


def run(arguments: argparse.Namespace) -> int:
    """Carry out one of the actions; returns the exit code.

    Raises:
        ConfigError: a bad name, files in the way, nothing to install, or something to remove that is no environment.
        DependencyError: the package needs another version of what trivet runs on.
    """
    match arguments.action:
        case "init":
            directory = write_package(arguments.name, folder=arguments.path)
            print(f"environment {arguments.name} in {directory}; install it with: uv run trivet env install {arguments.name}")
            return 0
        case "install":
            return install(choose_source(arguments.what, folder=arguments.path))
        case "list":
            return list_environments()
        case _:
            return remove(arguments.name)


def write_package(name: str, *, folder: Path) -> Path:
    """Write a new environment package; returns its directory.

    Raises:
        ConfigError: the name is none that a package and a module can have, or its directory exists.
    """
    if _NAME.fullmatch(name) is None or keyword.iskeyword(name):
        raise ConfigError(
            "an environment's name has lower-case letters, digits and single dashes, like my-env, and is no word of Python's own; "
            f"got {name!r}"
        )
    module = name.replace("-", "_")
    if importlib.util.find_spec(module) is not None:
        raise ConfigError(f"a module {module!r} is installed already, which the environment would hide; choose another name")
    directory = folder / module
    if directory.exists():
        raise ConfigError(f"{directory} exists already; choose another name, or remove it")
    try:
        directory.mkdir(parents=True)
    except OSError as exc:
        raise ConfigError(f"{directory} cannot be written: {exc.strerror}; choose another --path") from exc
    for file, content in package_files(name).items():
        (directory / file).write_text(content)
    return directory


def package_files(name: str) -> Mapping[str, str]:
    """Return the content of a new package by file name."""
    module = name.replace("-", "_")
    templates = {
        "pyproject.toml": "environment_pyproject.toml",
        f"{module}.py": "environment_module.txt",
        "README.md": "environment_readme.md",
    }
    return {
        file: Template((_TEMPLATES / template).read_text()).substitute(name=name, module=module)
        for file, template in templates.items()
    }


def choose_source(what: str, *, folder: Path) -> Sequence[str]:
    """Return what the installer is told: a directory, editable, a wheel, or a requirement.

    Raises:
        ConfigError: it is a path without a package, or nothing that could be one.
    """
    name = what.rpartition("/")[2] if not Path(what).exists() else what
    for directory in (Path(what), folder / what, folder / name.replace("-", "_")):
        if (directory / "pyproject.toml").is_file():
            return ("-e", str(directory))
    if what.endswith(".whl") and Path(what).is_file():
        return (what,)
    if what.startswith((".", "/", "~")) or Path(what).is_dir():
        raise ConfigError(f"{what} has no pyproject.toml: it is no package; `trivet env init NAME` writes one")
    if _REQUIREMENT.fullmatch(what) is None:
        there = sorted(path.parent.name for path in folder.glob("*/pyproject.toml"))
        raise ConfigError(
            f"{what!r} is neither a directory, nor one of {folder}/ ({', '.join(there) or 'which has none'}), nor a package's name"
        )
    return (what,)


def install(source: Sequence[str]) -> int:
    """Install into the Python that runs this; returns the installer's exit code.

    Raises:
        ConfigError: the package is one that trivet itself runs on, or there is no installer.
        DependencyError: it needs another version of what trivet runs on; nothing was changed.
    """
    project = find_project_packages()
    name = canonicalize_name(_NAME_OF_REQUIREMENT.split(source[0])[0])
    if name == LIBRARY:
        raise ConfigError(f"{source[0]} is no environment: it comes with the environments, which are written with it")
    if name in project:
        raise ConfigError(
            f"{source[0]} is no environment: trivet itself runs on {name} {project[name].version}, which keeps its version"
        )
    print("installing:", *source, flush=True)
    return install_under_constraints(source, installer=choose_installer(), project=project)


def list_environments(installed: InstalledPackages | None = None) -> int:
    """Print every installed environment with its version, where it came from, and whether it loads.

    Returns:
        1 when one does not load, else 0.
    """
    environments = find_environments(installed)
    if not environments:
        print("no environments are installed; `trivet env install NAME` installs one")
        return 0
    problems = check_imports([environment.module for environment in environments])
    rows = [("NAME", "VERSION", "FROM", "LOADS")]
    for environment in environments:
        rows.append(
            (
                describe_name(environment),
                environment.version,
                environment.origin.describe(base=Path.cwd()),
                f"no: {problem}" if (problem := problems[environment.module]) else "yes",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        print(*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3], sep="  ")
    return int(any(problems.values()))


def describe_name(environment: EnvironmentPackage) -> str:
    """Return the package's name, with the id that a configuration uses where that is another."""
    env_id = environment.module.replace("_", "-")
    return environment.name if env_id == canonicalize_name(environment.name) else f"{environment.name} (id {env_id})"


def remove(name: str) -> int:
    """Uninstall an environment; returns the installer's exit code.

    Raises:
        ConfigError: it is not installed, is no environment, trivet runs on it, or another environment requires it.
    """
    environment = choose_environment(name.rpartition("/")[2], InstalledPackages())
    code = uninstall(environment.name, installer=choose_installer())
    if code == 0 and environment.origin.kind == "editable":
        print(f"its directory stays: {environment.origin.describe_location(base=Path.cwd())}")
    return code


def choose_environment(name: str, installed: InstalledPackages) -> EnvironmentPackage:
    """Return the installed environment of that name, which may be removed.

    Raises:
        ConfigError: it is not installed, is no environment, trivet runs on it, or another environment requires it.
    """
    wanted = canonicalize_name(name)
    environments = {canonicalize_name(environment.name): environment for environment in find_environments(installed)}
    environment = environments.get(wanted)
    if environment is None:
        if wanted == LIBRARY:
            raise ConfigError(f"{wanted} is no environment: environments are written with it, so it is not removed")
        if wanted in find_project_packages(installed):
            raise ConfigError(f"{wanted} is no environment: trivet itself runs on it, so it is not removed")
        there = f"environments that are installed: {', '.join(environments) or 'none'}"
        if installed.find(wanted) is not None:
            raise ConfigError(
                f"{wanted} is no environment: no module of it has load_environment, and it does not require verifiers; it is not "
                f"removed. {there[0].upper()}{there[1:]}"
            )
        raise ConfigError(f"{wanted} is not installed; {there}")
    if environment.required_by:
        others = ", ".join(environment.required_by)
        raise ConfigError(f"{environment.name} is required by {others}, which would no longer load; remove {others} first")
    return environment
