"""Makes the `pyproject.toml` of a workspace, and says what a project file that exists already lacks. `trivet init` calls it.

`project_file` and `missing_entries` are pure. The rest asks the installation and pip, and changes nothing.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from importlib import metadata
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import unquote, urlparse

_TEMPLATE = Path(__file__).with_name("templates") / "workspace_pyproject.toml"
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


def project_file(*, trivet_source: str | None, find_links: Sequence[str]) -> str:
    """Return the text of a workspace's `pyproject.toml`.

    Args:
        trivet_source: a value of `[tool.uv.sources]`, or None when trivet comes from an index.
        find_links: directories and pages of wheels, beside the index.
    """
    links = _NO_FIND_LINKS
    if find_links:
        reason = "# uv does not read pip's settings: these are the places of wheels that this machine's pip was told."
        links = f"{reason}\nfind-links = {json.dumps(list(find_links))}"
    source = "# trivet comes from the index." if trivet_source is None else f"trivet = {trivet_source}"
    return Template(_TEMPLATE.read_text()).substitute(find_links=links, trivet_source=source)


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
        asked = _run([python, "-m", "pip", "config", "get", "global.find-links"])
        if asked is not None:
            places += asked.split()
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


def _run(command: Sequence[str]) -> str | None:
    """Return what a command prints, None when it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=True, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
