"""The command `trivet env`: writes, installs, lists, tests and removes environment packages.

Packages that trivet itself runs on never change: each environment is installed into a virtual environment of its own.
"""

import argparse
import importlib.util
import json
import keyword
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import NamedTuple

from packaging.utils import canonicalize_name

from trivet.cli.env_test import configure_test, run_test
from trivet.cli.environment_packages import choose_source, install, remove, require_on_hub
from trivet.dependencies import InstalledPackages
from trivet.environments.packages.discovery import EnvironmentPackage, check_imports, find_environments
from trivet.environments.packages.interpreters import AUTO, TRIVET_VENV, find_venv_directory, find_venvs
from trivet.errors import ConfigError

FOLDER = Path("environments")
_ENVIRONMENT_NAME = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*")
_TEMPLATES = Path(__file__).with_name("templates")
_RELEASES = {"v0": "verifiers>=0.3.1,<0.4", "v1": "verifiers>=0.4,<0.5"}
_MODULES = {"v0": "environment_module.txt", "v1": "environment_v1_module.txt"}
_READMES = {"v0": "environment_readme.md", "v1": "environment_v1_readme.md"}
"""The required verifiers, and the templates of module and README, for a new package, by the generation of the verifiers API."""


def configure_env(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this tool."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    init = actions.add_parser("init", help="write a new environment package that works")
    init.add_argument("name", metavar="NAME", help="its id, in lower case with dashes: my-env")
    init.add_argument(
        "--api",
        choices=sorted(_MODULES),
        default="v0",
        help="the generation of the verifiers API to write it for (default: v0)",
    )
    init.add_argument("--path", type=Path, default=FOLDER, help="the folder of environments (default: environments)")
    install = actions.add_parser(
        "install", help="install an environment into a virtual environment beside trivet's own, which does not change"
    )
    install.add_argument(
        "what",
        metavar="NAME|PATH|REQUIREMENT",
        help="its name in environments/, a package's directory or wheel, OWNER/NAME of the hub, or with --from-index a requirement",
    )
    install.add_argument("--venv", metavar="NAME", help="the name of its virtual environment (default: the environment's id)")
    install.add_argument("--from-index", action="store_true", help="download a package that is not here from the package index")
    install.add_argument("--path", type=Path, default=FOLDER, help="the folder of environments (default: environments)")
    listing = actions.add_parser(
        "list", help="show the installed environments: version, where each came from, whether it loads"
    )
    listing.add_argument("--json", action="store_true", help="print them as JSON")
    configure_test(actions.add_parser("test", help="find out whether an environment is worth training on"))
    remove = actions.add_parser(
        "remove", help="remove an environment with its virtual environment; a directory of sources stays"
    )
    remove.add_argument("name", metavar="NAME", help="its name as in `trivet env list`")


def run_env(arguments: argparse.Namespace) -> int:
    """Run one of the actions of `trivet env`. Return the exit code."""
    directory = find_venv_directory()
    match arguments.action:
        case "init":
            written = write_package(arguments.name, folder=arguments.path, api=arguments.api)
            print(f"environment {arguments.name} in {written}; install it with: uv run trivet env install {arguments.name}")
            return 0
        case "install":
            source = choose_source(arguments.what, folder=arguments.path, is_index_allowed=arguments.from_index)
            venv = arguments.venv
            if venv is not None and (_ENVIRONMENT_NAME.fullmatch(venv) is None or venv in (TRIVET_VENV, AUTO)):
                raise ConfigError(
                    f"--venv {venv} is no name of a virtual environment: it has lower-case letters, digits and dashes, and is "
                    f"neither {TRIVET_VENV} nor {AUTO}"
                )
            require_on_hub(source)
            print("installing:", source.describe(), flush=True)
            started = time.monotonic()
            made, package, api = install(source, directory=directory, venv=venv)
            print(
                f"{package.module.replace('_', '-')} {package.version} ({api} API) in {made.path}: virtual environment "
                f"{made.describe()}, {time.monotonic() - started:.1f} s"
            )
            return 0
        case "test":
            return run_test(arguments)
        case "list":
            return list_environments(directory, as_json=arguments.json)
        case _:
            remove(arguments.name, directory=directory)
            print(f"{arguments.name} was removed with its virtual environment")
            return 0


def write_package(name: str, *, folder: Path, api: str = "v0") -> Path:
    """Write a new environment package and return its directory.

    Args:
        api: the generation of the verifiers API, `v0` or `v1`.
    """
    if _ENVIRONMENT_NAME.fullmatch(name) is None or keyword.iskeyword(name):
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
    values = {
        "name": name,
        "module": module,
        "class_name": "".join(part.capitalize() for part in name.split("-")),
        "verifiers": _RELEASES[api],
    }
    templates = {"pyproject.toml": "environment_pyproject.toml", f"{module}.py": _MODULES[api], "README.md": _READMES[api]}
    for file, template in templates.items():
        (directory / file).write_text(Template((_TEMPLATES / template).read_text()).substitute(values))
    return directory


class _ListedEnvironment(NamedTuple):
    """A line of `trivet env list`."""

    name: str
    version: str
    location: str
    """The virtual environment, or trivet's own Python."""
    source: str
    """Where the package was installed from."""
    loads: str
    """`yes`, or `no` with the reason."""


def list_environments(directory: Path, installed: InstalledPackages | None = None, *, as_json: bool = False) -> int:
    """Print every installed environment with its version, its virtual environment, where it came from, and whether it loads.

    Args:
        directory: the directory of all virtual environments.
        installed: the packages of trivet's own Python.

    Returns:
        The exit code: 1 if an environment does not load, else 0.
    """
    listed: list[_ListedEnvironment] = []
    for venv in find_venvs(directory):
        location = f"{venv.name} (verifiers {venv.version_of('verifiers')})"
        listed += _inspect_environments(find_environments(venv.packages()), location, python=str(venv.python))
    listed += _inspect_environments(find_environments(installed), TRIVET_VENV)
    if as_json:
        print(json.dumps([line._asdict() for line in listed], indent=1))
    elif not listed:
        print("no environments are installed; `trivet env install NAME` installs one")
    else:
        lines = [_ListedEnvironment("NAME", "VERSION", "IN", "FROM", "LOADS"), *listed]
        widths = [max(len(line[column]) for line in lines) for column in range(4)]
        for line in lines:
            print(*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line.loads, sep="  ")
    return int(any(line.loads != "yes" for line in listed))


def _inspect_environments(
    environments: Sequence[EnvironmentPackage], location: str, *, python: str = sys.executable
) -> list[_ListedEnvironment]:
    """Import the environments of one interpreter in a process, and return a line for each."""
    problems = check_imports([environment.module for environment in environments], python=python)
    return [
        _ListedEnvironment(
            name=describe_name(env),
            version=env.version,
            location=location,
            source=env.origin.describe(base=Path.cwd()),
            loads=f"no: {problems[env.module]}" if problems[env.module] else "yes",
        )
        for env in environments
    ]


def describe_name(environment: EnvironmentPackage) -> str:
    """Return the package's name, and the id that configurations use if it differs from the name."""
    env_id = environment.module.replace("_", "-")
    return environment.name if env_id == canonicalize_name(environment.name) else f"{environment.name} (id {env_id})"
