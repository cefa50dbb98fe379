"""Checks that an environment is installed, and names the command that installs it. Imports no environment and no verifiers."""

import importlib.util
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
        EnvironmentLoadError: there is none; the message says how to install it, from this checkout when it is there. Or the
            file of a function is missing.
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
    raise EnvironmentLoadError(
        f"env.id = {env_id!r} is not installed (no module {module!r}). If you trust it, install it with: "
        f"uv run trivet env install {env_id}{'' if '/' in env_id else ' --from-index'}. "
        f"Environments of this checkout: {', '.join(here) or 'none'}"
    )
