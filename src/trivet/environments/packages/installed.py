"""Checks that an environment is installed, and names the command that installs it. Imports no environment and no verifiers."""

import difflib
import importlib.util
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from trivet.errors import EnvironmentLoadError
from trivet.process.imports import file_of

LIBRARY = "verifiers"
"""The library that environments are written with. They require it; trivet does not."""
LOADER = "load_environment"
"""The function of an environment's module that verifiers calls."""


def require_installed(env_id: str, *, environments_dir: Path = Path("environments")) -> None:
    """Check that the module of `env_id` can be found.

    Raises:
        EnvironmentLoadError: there is none; the message names the environment with nearly this name, or says how to install it,
            from this checkout when it is there. Or the file of a function is missing.
    """
    if (file := file_of(env_id)) is not None:
        if not file.is_file():
            raise EnvironmentLoadError(f"env.id = {env_id!r}: there is no file {file}")
        return
    package = env_id.split("/")[-1]
    module = package.replace("-", "_")
    if importlib.util.find_spec(module) is not None:
        return
    folder = environments_dir / module
    if folder.is_dir():
        raise EnvironmentLoadError(
            f"env.id = {env_id!r} is not installed; install it with: uv run trivet env install {package}"
        )
    here = sorted(path.parent.name.replace("_", "-") for path in environments_dir.glob("*/pyproject.toml"))
    if nearest := difflib.get_close_matches(package.replace("_", "-"), [*here, *_installed_environments()], n=1, cutoff=0.8):
        raise EnvironmentLoadError(f"env.id = {env_id!r} is not installed (no module {module!r}); did you mean {nearest[0]!r}?")
    raise EnvironmentLoadError(
        f"env.id = {env_id!r} is not installed (no module {module!r}). If you trust it, install it with: "
        f"uv run trivet env install {env_id}{'' if '/' in env_id else ' --from-index'}. "
        f"Environments of this checkout: {', '.join(here) or 'none'}"
    )


def _installed_environments() -> Iterator[str]:
    """Yield the names of installed packages that require verifiers."""
    for package in metadata.distributions():
        if any(requirement.startswith(LIBRARY) for requirement in package.requires or ()):
            yield package.name.replace("_", "-")
