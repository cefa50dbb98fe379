"""`trivet init [DIR]`: makes a workspace with a project file, the example environments and configurations, endpoints and a README.

It imports only the standard library besides trivet itself, so it works after `pip install --no-deps` of the wheel.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence, Set
from importlib import metadata
from pathlib import Path
from string import Template
from typing import Any, cast
from urllib.parse import unquote, urlparse

from trivet.config.user_input import read_toml_file
from trivet.errors import ConfigError

ENVIRONMENTS = ("alphabet-sort", "gsm8k", "math-python", "reverse-text", "wiki-search", "wordle")
PROJECT_FILE = "pyproject.toml"

_PACKAGE = Path(__file__).parents[1]
_TEMPLATES = Path(__file__).with_name("templates")
_PIP_TIMEOUT_S = 20.0
_OWN_ENTRIES = {("project", "name"), ("project", "version"), ("tool", "uv", "package")}
"""Entries of the project file that each project chooses for itself."""
_BUILD_ENTRIES = {("project", "optional-dependencies"), ("tool", "uv", "conflicts")}
"""Entries with which a user chooses the build of vLLM. A project that requires one build does not need them."""
_MAX_LISTED_DEPTH = 2
"""Missing tables down to this depth, such as `[tool.uv]`, are reported key by key, deeper ones as a whole."""
_NO_FIND_LINKS = """\
# Without an NVIDIA GPU, name here the page of CPU wheels that PyTorch's install guide names: else torch comes from the
# default index, with CUDA libraries of several GB.
# find-links = ["PAGE"]"""


def main() -> int:
    """Run `trivet init` under the name `vf-setup`, which verifiers uses for this command."""
    from trivet.cli.main import main as run_tool

    return run_tool(["init", *sys.argv[1:]])


def configure_init(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this tool."""
    parser.add_argument(
        "directory",
        type=Path,
        nargs="?",
        default=Path(),
        metavar="DIR",
        help="where the workspace is made (default: here); files that exist there are left as they are",
    )


def run_init(arguments: argparse.Namespace) -> int:
    """Write the missing files of the workspace, and print the next commands."""
    directory: Path = arguments.directory
    files = workspace_files(project=project_file(trivet_source=installed_source(), find_links=pip_find_links(os.environ)))
    created, kept = write_workspace(directory, files)
    present = len(files) - len(created)
    print(f"workspace in {directory.absolute()}: {len(created)} files written, {present} were there already")
    if different := [name for name in kept if name != PROJECT_FILE]:
        print(f"left as they are, and different from the examples: {', '.join(different)}")
    sync = "uv sync --extra cpu --compile-bytecode    # with an NVIDIA GPU: --extra cuda"
    if PROJECT_FILE in kept:
        path, new_text = directory / PROJECT_FILE, files[PROJECT_FILE].decode()
        try:
            project = cast("Mapping[str, Any]", read_toml_file(path))
        except (OSError, ValueError) as exc:  # TOML and UTF-8 errors are ValueErrors
            raise ConfigError(
                f"{path} cannot be read: {exc}; repair it, then run this command again to see what to add"
            ) from exc
        if requires_build(project):
            sync = "uv sync --compile-bytecode"
        missing = "".join(f"  {entry}\n" for entry in missing_entries(project, tomllib.loads(new_text)))
        if not missing or project.get("project", {}).get("name") == "trivet":
            print(f"{path} has everything that a workspace needs; it was not changed")
        else:
            print(f"{path} exists and was not changed. Add to it what it lacks:\n{missing}", end="")
            print(f"A new one would be, with the reasons:\n\n{new_text}")
    print("next:")
    if directory.absolute() != Path.cwd():
        print(f"  cd {directory}")
    print(f"  {sync}")
    print("  uv run trivet quickstart")
    return 0


def write_workspace(directory: Path, files: Mapping[str, bytes]) -> tuple[list[str], list[str]]:
    """Write every file that does not exist, so that a second call completes an incomplete workspace.

    Returns the names of the files that it made, and of those that existed with other content and were not changed.
    """
    created: list[str] = []
    kept: list[str] = []
    try:
        for name, content in files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with path.open("xb") as file:  # fails if anything has this name, even a broken link
                    file.write(content)
                created.append(name)
            except FileExistsError:
                if not path.is_file() or path.read_bytes() != content:
                    kept.append(name)
    except OSError as exc:
        raise ConfigError(
            f"{directory} cannot be written: {exc.filename}: {exc.strerror}; choose another directory, or move that away"
        ) from exc
    return created, kept


def workspace_files(*, project: str) -> Mapping[str, bytes]:
    """Return the content of every file of a workspace, by its name relative to the workspace.

    Args:
        project: the text of the project file.
    """
    files = {
        PROJECT_FILE: project.encode(),
        "README.md": (_TEMPLATES / "workspace_readme.md").read_bytes(),
        "environments/AGENTS.md": (_TEMPLATES / "environments_guide.md").read_bytes(),
    }
    files |= _read_tree(find_packaged("configs"), "configs")
    for name in ENVIRONMENTS:
        module = name.replace("-", "_")
        files |= _read_tree(find_packaged("environments") / module, f"environments/{module}")
    return files


def find_packaged(name: str) -> Path:
    """Return the directory of the example `configs` or `environments`: in the wheel, or beside `src/` in a checkout."""
    packaged = _PACKAGE / f"example_{name}"  # the name that pyproject.toml gives it in the wheel (force-include)
    return packaged if packaged.is_dir() else _PACKAGE.parents[1] / name


def _read_tree(directory: Path, target: str) -> Mapping[str, bytes]:
    """Return the content of all files below `directory`, by their path below `target`, without files that Python generates."""
    names = sorted(path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
    return {
        f"{target}/{name.as_posix()}": (directory / name).read_bytes()
        for name in names
        if not any(part == "__pycache__" or part.endswith(".egg-info") for part in name.parts)
    }


def project_file(*, trivet_source: str | None, find_links: Sequence[str]) -> str:
    """Return the text of a workspace's `pyproject.toml`.

    Args:
        trivet_source: the value of trivet in `[tool.uv.sources]`, or None if trivet comes from an index.
        find_links: directories and pages of wheels that are used besides the index.
    """
    links = _NO_FIND_LINKS
    if find_links:
        reason = "# uv does not read pip's settings: these are the places of wheels in this machine's settings of pip."
        links = f"{reason}\nfind-links = {json.dumps(list(find_links))}"
    source = "# trivet comes from the index." if trivet_source is None else f"trivet = {trivet_source}"
    return Template((_TEMPLATES / "workspace_pyproject.toml").read_text()).substitute(find_links=links, trivet_source=source)


def describe_source(direct_url: Mapping[str, Any] | None) -> str | None:
    """Return the value in `[tool.uv.sources]` that installs the same trivet as here, or None for a release of an index.

    Args:
        direct_url: the content of the installation's direct_url.json (PEP 610), or None if it has no such file.
    """
    if direct_url is None:
        return None
    url = str(direct_url["url"])
    if "vcs_info" in direct_url:
        return f"{{ git = {json.dumps(url)}, rev = {json.dumps(direct_url['vcs_info']['commit_id'])} }}"
    if not url.startswith("file://"):
        return f"{{ url = {json.dumps(url)} }}"
    path = json.dumps(unquote(urlparse(url).path))
    is_editable = direct_url.get("dir_info", {}).get("editable", False)
    return f"{{ path = {path}, editable = true }}" if is_editable else f"{{ path = {path} }}"


def installed_source() -> str | None:
    """Return `describe_source` of the running trivet."""
    text = metadata.distribution("trivet").read_text("direct_url.json")
    return describe_source(json.loads(text) if text else None)


def pip_find_links(environ: Mapping[str, str]) -> Sequence[str]:
    """Return the directories and pages of wheels that uv or pip is configured to use on this machine, each once, in order."""
    links = environ.get("UV_FIND_LINKS", "").replace(",", " ").split() + environ.get("PIP_FIND_LINKS", "").split()
    for python in (sys.executable, f"{sys.base_prefix}/bin/python3"):  # a virtual environment made by uv has no pip
        command = [python, "-m", "pip", "config", "get", "global.find-links"]
        try:
            answer = subprocess.run(
                command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=True, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.SubprocessError):
            continue
        links += answer.stdout.split()
        break
    return list(dict.fromkeys(links))


def requires_build(project: Mapping[str, Any]) -> bool:
    """Return whether the project requires a build of vLLM, as after `uv add "trivet[cpu]"`. Then it needs no extras of its own."""
    return any(entry.replace(" ", "").startswith("trivet[") for entry in project.get("project", {}).get("dependencies", []))


def missing_entries(project: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    """Yield the entries of `wanted` that `project` lacks, as `table.key` or `table.key: entry`.

    A requirement counts as present with any version and any extras, and a key with any value.
    """
    ignored = _OWN_ENTRIES | (_BUILD_ENTRIES if requires_build(project) else set())
    yield from _missing_below(project, wanted, ignored=ignored, above=())


def _missing_below(
    table: Mapping[str, Any], wanted: Mapping[str, Any], *, ignored: Set[tuple[str, ...]], above: tuple[str, ...]
) -> Iterator[str]:
    """Do the same for the tables at the path `above`. The paths in `ignored` are never missing."""
    for key, value in wanted.items():
        path = (*above, key)
        present = table.get(key)
        if path in ignored:
            continue
        if isinstance(value, Mapping) and len(path) <= _MAX_LISTED_DEPTH:
            yield from _missing_below(present or {}, value, ignored=ignored, above=path)
        elif present is None:
            yield ".".join(path)
        elif isinstance(value, Mapping) and isinstance(present, Mapping):
            yield from (".".join((*path, name)) for name in value if name not in present)
        elif isinstance(value, list) and isinstance(present, list):
            names = [_entry_name(entry) for entry in present]
            yield from (f"{'.'.join(path)}: {entry}" for entry in value if _entry_name(entry) not in names)


def _entry_name(entry: object) -> object:
    """Return the package's name of a requirement. Any other entry is returned as it is."""
    match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", entry) if isinstance(entry, str) else None
    return match.group(0).lower().replace("_", "-") if match else entry
