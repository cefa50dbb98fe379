"""Whether an environment is installed, and the command that installs it. Imports no environment and no verifiers."""

import importlib.util
from pathlib import Path

from trivet.config.orchestrator import EnvConfig
from trivet.errors import EnvironmentLoadError


def require_installed(env: EnvConfig, *, environments_dir: Path = Path("environments")) -> None:
    """
    Raises:
        EnvironmentLoadError: there is no module for `env`; says how to install it, from this checkout when it is there.
    """
    package = env.id.split("/")[-1]
    module = package.replace("-", "_")
    if importlib.util.find_spec(module) is not None:
        return
    folder = environments_dir / module
    command = f"uv pip install -e {folder}" if folder.is_dir() else f"uv pip install {package}"
    raise EnvironmentLoadError(f"environment {env.id!r} is not installed (no module {module!r}); install it with: {command}")
