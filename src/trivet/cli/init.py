"""`trivet init [DIR]`: makes a workspace: a project file, the example environments and configurations, endpoints, a README.

It needs nothing but the standard library, so that `pip install --no-deps` of the wheel is enough to run it.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
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
"""Entries that a user's own project decides by itself."""
_BUILD_ENTRIES = {("project", "optional-dependencies"), ("tool", "uv", "conflicts")}
"""Entries that let a user choose the build of vLLM. A project that requires one build has chosen."""
_NAMED_DEPTH = 2
"""Tables up to `[tool.uv]` are compared key by key even where they are missing. A deeper one is then named as a whole."""
_NO_FIND_LINKS = """\
# Without an NVIDIA GPU, name here the page of CPU wheels that PyTorch's install guide names: else torch comes from the
# default index, with CUDA libraries of several GB.
# find-links = ["PAGE"]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The outcome of `write_workspace`, by names relative to the workspace."""

    created: Sequence[str]
    kept: Sequence[str]
    """Files that existed with other content. They were left as they are."""


def main() -> int:
    """Run `vf-setup`, the name that verifiers has for this command."""
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
    """Make the missing files of the workspace, and print what to do next."""
    directory: Path = arguments.directory
    files = workspace_files(project=project_file(trivet_source=installed_source(), find_links=pip_find_links(os.environ)))
    written = write_workspace(directory, files)
    present = len(files) - len(written.created)
    print(f"workspace in {directory.absolute()}: {len(written.created)} files written, {present} were there already")
    if kept := [name for name in written.kept if name != PROJECT_FILE]:
        print(f"left as they are, and different from the examples: {', '.join(kept)}")
    sync = "uv sync --extra cpu --compile-bytecode    # with an NVIDIA GPU: --extra cuda"
    if PROJECT_FILE in written.kept:
        path, wanted = directory / PROJECT_FILE, files[PROJECT_FILE].decode()
        try:
            project = cast("Mapping[str, Any]", read_toml_file(path))
        except (OSError, ValueError) as exc:  # TOML and UTF-8 errors are ValueErrors
            raise ConfigError(
                f"{path} cannot be read: {exc}; repair it, then run this command again to see what to add"
            ) from exc
        if requires_build(project):
            sync = "uv sync --compile-bytecode"
        missing = "".join(f"  {entry}\n" for entry in missing_entries(project, tomllib.loads(wanted)))
        if not missing or project.get("project", {}).get("name") == "trivet":
            print(f"{path} has everything that a workspace needs; it was not changed")
        else:
            print(f"{path} exists and was not changed. Add to it what it lacks:\n{missing}", end="")
            print(f"A new one would be, with the reasons:\n\n{wanted}")
    print("next:")
    if directory.absolute() != Path.cwd():
        print(f"  cd {directory}")
    print(f"  {sync}")
    print("  uv run trivet quickstart")
    return 0


def write_workspace(directory: Path, files: Mapping[str, bytes]) -> Written:
    """Write every file that does not exist. Repeated, it completes a workspace that exists in part."""
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
    files |= _read_tree(find_packaged("configs"), "configs")
    for name in ENVIRONMENTS:
        module = name.replace("-", "_")
        files |= _read_tree(find_packaged("environments") / module, f"environments/{module}")
    return files


def find_packaged(name: str) -> Path:
    """Return the directory of the example `configs` or `environments`: that of the wheel, or that beside `src/` in a checkout."""
    packaged = _PACKAGE / f"example_{name}"  # pyproject.toml, force-include
    return packaged if packaged.is_dir() else _PACKAGE.parents[1] / name


def _read_tree(directory: Path, target: str) -> Mapping[str, bytes]:
    """Read all files below `directory` but those that Python leaves there."""
    names = sorted(path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
    return {
        f"{target}/{name.as_posix()}": (directory / name).read_bytes()
        for name in names
        if not any(part == "__pycache__" or part.endswith(".egg-info") for part in name.parts)
    }


def project_file(*, trivet_source: str | None, find_links: Sequence[str]) -> str:
    """Return the text of a workspace's `pyproject.toml`.

    Args:
        trivet_source: a value of `[tool.uv.sources]`, or None when trivet comes from an index.
        find_links: directories and pages of wheels, beside the index.
    """
    links = _NO_FIND_LINKS
    if find_links:
        reason = "# uv does not read pip's settings: these are the places of wheels in this machine's settings of pip."
        links = f"{reason}\nfind-links = {json.dumps(list(find_links))}"
    source = "# trivet comes from the index." if trivet_source is None else f"trivet = {trivet_source}"
    return Template((_TEMPLATES / "workspace_pyproject.toml").read_text()).substitute(find_links=links, trivet_source=source)


def describe_source(direct_url: Mapping[str, Any] | None) -> str | None:
    """Return the entry of `[tool.uv.sources]` that installs what is installed here, None for a release of an index.

    Args:
        direct_url: the installation's direct_url.json (PEP 610), None when it has none.
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
    """Return `describe_source` of the trivet that runs."""
    text = metadata.distribution("trivet").read_text("direct_url.json")
    return describe_source(json.loads(text) if text else None)


def pip_find_links(environ: Mapping[str, str]) -> Sequence[str]:
    """Return the places of wheels that uv or pip was told on this machine, each once, in order."""
    places = environ.get("UV_FIND_LINKS", "").replace(",", " ").split() + environ.get("PIP_FIND_LINKS", "").split()
    for python in (sys.executable, f"{sys.base_prefix}/bin/python3"):  # a virtual environment made by uv has no pip
        command = [python, "-m", "pip", "config", "get", "global.find-links"]
        try:
            asked = subprocess.run(
                command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=True, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.SubprocessError):
            continue
        places += asked.stdout.split()
        break
    return list(dict.fromkeys(places))


def requires_build(project: Mapping[str, Any]) -> bool:
    """Return whether the project itself requires a build of vLLM, as after `uv add "trivet[cpu]"`. Then it needs no extras."""
    return any(entry.replace(" ", "").startswith("trivet[") for entry in project.get("project", {}).get("dependencies", []))


def missing_entries(project: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    """Yield what `project` lacks of `wanted`, as `table.key` or `table.key: entry`.

    A requirement counts as present with any version and any extras, and a key with any value.
    """
    ignored = _OWN_ENTRIES | (_BUILD_ENTRIES if requires_build(project) else set())
    yield from _missing_below(project, wanted, ignored=ignored, above=())


def _missing_below(
    table: Mapping[str, Any], wanted: Mapping[str, Any], *, ignored: Set[tuple[str, ...]], above: tuple[str, ...]
) -> Iterator[str]:
    for key, value in wanted.items():
        path = (*above, key)
        present = table.get(key)
        if path in ignored:
            continue
        if isinstance(value, Mapping) and len(path) <= _NAMED_DEPTH:
            yield from _missing_below(present or {}, value, ignored=ignored, above=path)
        elif present is None:
            yield ".".join(path)
        elif isinstance(value, Mapping) and isinstance(present, Mapping):
            yield from (".".join((*path, name)) for name in value if name not in present)
        elif isinstance(value, list) and isinstance(present, list):
            names = [_entry_name(entry) for entry in present]
            yield from (f"{'.'.join(path)}: {entry}" for entry in value if _entry_name(entry) not in names)


def _entry_name(entry: object) -> object:
    """Reduce a requirement to its package's name; any other entry stands for itself."""
    match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", entry) if isinstance(entry, str) else None
    return match.group(0).lower().replace("_", "-") if match else entry
