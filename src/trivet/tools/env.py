"""`trivet env init NAME` and `trivet env install NAME|PATH`: environment packages, made and installed with the ordinary tools."""

import argparse
import importlib.util
import keyword
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from trivet.errors import ConfigError

FOLDER = Path("environments")
_NAME = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*")
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:\[[A-Za-z0-9,._-]+\])?(?:[=<>!~]=?[A-Za-z0-9.*]+)?")
_TEMPLATES = Path(__file__).with_name("templates")


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    init = actions.add_parser("init", help="write a new environment package that works")
    init.add_argument("name", metavar="NAME", help="its id, in lower case with dashes: my-env")
    init.add_argument("--path", type=Path, default=FOLDER, help="the folder of environments (default: environments)")
    install = actions.add_parser("install", help="install an environment into this Python")
    install.add_argument(
        "what", metavar="NAME|PATH", help="a package's directory, its name in environments/, or a package to download"
    )
    install.add_argument("--path", type=Path, default=FOLDER, help="the folder of environments (default: environments)")


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        ConfigError: a bad name, files in the way, or nothing to install.
    """
    if arguments.action == "init":
        directory = write_package(arguments.name, folder=arguments.path)
        print(f"environment {arguments.name} in {directory}; install it with: uv run trivet env install {arguments.name}")
        return 0
    return install(choose_source(arguments.what, folder=arguments.path))


def write_package(name: str, *, folder: Path) -> Path:
    """
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
    """Content by file name."""
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
    """What the installer is told: a directory, editable, or a requirement.

    Raises:
        ConfigError: it is a path without a package, or nothing that could be one.
    """
    name = what.rpartition("/")[2] if not Path(what).exists() else what
    for directory in (Path(what), folder / what, folder / name.replace("-", "_")):
        if (directory / "pyproject.toml").is_file():
            return ("-e", str(directory))
    if what.startswith((".", "/", "~")) or Path(what).is_dir():
        raise ConfigError(f"{what} has no pyproject.toml: it is no package; `trivet env init NAME` writes one")
    if _REQUIREMENT.fullmatch(what) is None:
        there = sorted(path.parent.name for path in folder.glob("*/pyproject.toml"))
        raise ConfigError(
            f"{what!r} is neither a directory, nor one of {folder}/ ({', '.join(there) or 'which has none'}), nor a package's name"
        )
    return (what,)


def install(source: Sequence[str]) -> int:
    """Into the Python that runs this, with uv where there is one; returns the installer's exit code."""
    uv = shutil.which("uv")
    command = [uv, "pip", "install", "--python", sys.executable] if uv else [sys.executable, "-m", "pip", "install"]
    print("installing:", *source, flush=True)
    return subprocess.run([*command, *source], check=False).returncode
