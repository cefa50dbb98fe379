"""`trivet init [DIR]`: makes a workspace: a project file, the example environments and configurations, endpoints, a README.

It needs nothing but the standard library, so that `pip install --no-deps` of the wheel is enough to run it.
"""

import argparse
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trivet.config.user_input import read_toml_file
from trivet.errors import ConfigError
from trivet.examples.files import example_configs, example_environments
from trivet.tools.workspace_project import installed_source, missing_entries, pip_find_links, project_file, requires_build

ENVIRONMENTS = ("alphabet-sort", "gsm8k", "math-python", "reverse-text", "wiki-search", "wordle")
PROJECT_FILE = "pyproject.toml"

_TEMPLATES = Path(__file__).with_name("templates")


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The outcome of `write_workspace`, by names relative to the workspace."""

    created: Sequence[str]
    kept: Sequence[str]
    """Files that existed with other content. They were left as they are."""


def main() -> int:
    """Run `vf-setup`, the name that verifiers has for this command."""
    from trivet.tools.cli import main as run_tool

    return run_tool(["init", *sys.argv[1:]])


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this tool."""
    parser.add_argument(
        "directory",
        type=Path,
        nargs="?",
        default=Path(),
        metavar="DIR",
        help="where the workspace is made (default: here); files that exist there are left as they are",
    )


def run(arguments: argparse.Namespace) -> int:
    """Make what is missing of the workspace, and say what to do next.

    Raises:
        ConfigError: the directory cannot be written, or its project file cannot be read.
    """
    directory: Path = arguments.directory
    files = workspace_files(project=project_file(trivet_source=installed_source(), find_links=pip_find_links(os.environ)))
    written = write_workspace(directory, files)
    present = len(files) - len(written.created)
    print(f"workspace in {directory.absolute()}: {len(written.created)} files written, {present} were there already")
    if kept := [name for name in written.kept if name != PROJECT_FILE]:
        print(f"left as they are, and different from the examples: {', '.join(kept)}")
    sync = "uv sync --extra cpu --compile-bytecode    # with an NVIDIA GPU: --extra cuda"
    if PROJECT_FILE in written.kept:
        project = _read_project(directory / PROJECT_FILE)
        if requires_build(project):
            sync = "uv sync --compile-bytecode"
        print(_describe_additions(project, path=directory / PROJECT_FILE, wanted=files[PROJECT_FILE].decode()))
    print("next:")
    if directory.absolute() != Path.cwd():
        print(f"  cd {directory}")
    print(f"  {sync}")
    print("  uv run trivet quickstart")
    return 0


def write_workspace(directory: Path, files: Mapping[str, bytes]) -> Written:
    """Write every file that does not exist. Repeated, it completes a workspace that exists in part.

    Raises:
        ConfigError: the directory cannot be written.
    """
    created: list[str] = []
    kept: list[str] = []
    try:
        for name, content in files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with path.open("xb") as file:  # fails where anything has this name, a broken link too
                    file.write(content)
                created.append(name)
            except FileExistsError:
                if not path.is_file() or path.read_bytes() != content:
                    kept.append(name)
    except OSError as exc:
        raise ConfigError(
            f"{directory} cannot be written: {exc.filename}: {exc.strerror}; choose another directory, or move that away"
        ) from exc
    return Written(created=created, kept=kept)


def workspace_files(*, project: str) -> Mapping[str, bytes]:
    """Return the content of every file, by its name relative to the workspace.

    Args:
        project: the text of the project file.
    """
    files = {
        PROJECT_FILE: project.encode(),
        "README.md": (_TEMPLATES / "workspace_readme.md").read_bytes(),
        "environments/AGENTS.md": (_TEMPLATES / "environments_guide.md").read_bytes(),
    }
    files |= _read_tree(example_configs(), "configs")
    for name in ENVIRONMENTS:
        module = name.replace("-", "_")
        files |= _read_tree(example_environments() / module, f"environments/{module}")
    return files


def _read_tree(directory: Path, target: str) -> Mapping[str, bytes]:
    """Read all files below `directory` but those that Python leaves there."""
    names = sorted(path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
    return {
        f"{target}/{name.as_posix()}": (directory / name).read_bytes()
        for name in names
        if not any(part == "__pycache__" or part.endswith(".egg-info") for part in name.parts)
    }


def _read_project(path: Path) -> Mapping[str, Any]:
    """Read a project file."""
    try:
        return read_toml_file(path)
    except (OSError, ValueError) as exc:  # TOML and UTF-8 errors are ValueErrors
        raise ConfigError(f"{path} cannot be read: {exc}; repair it, then run this command again to see what to add") from exc


def _describe_additions(project: Mapping[str, Any], *, path: Path, wanted: str) -> str:
    """Say what the project file that exists lacks, and show a whole one to copy from."""
    missing = list(missing_entries(project, tomllib.loads(wanted)))
    if not missing or project.get("project", {}).get("name") == "trivet":
        return f"{path} has everything that a workspace needs; it was not changed"
    return (
        f"{path} exists and was not changed. Add to it what it lacks:\n"
        + "".join(f"  {entry}\n" for entry in missing)
        + f"A new one would be, with the reasons:\n\n{wanted}"
    )
