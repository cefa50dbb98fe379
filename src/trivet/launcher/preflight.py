"""What must hold on this machine before a run starts anything."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from trivet.config.orchestrator import EnvConfig
from trivet.errors import EnvironmentLoadError


def check_environments(envs: Sequence[EnvConfig], *, environments_dir: Path = Path("environments")) -> None:
    """
    Raises:
        EnvironmentLoadError: a package is not installed; says the command that installs it.
    """
    for env in envs:
        package = env.id.split("/")[-1]
        module = package.replace("-", "_")
        if importlib.util.find_spec(module) is None:
            folder = environments_dir / module
            command = f"uv pip install -e {folder}" if folder.is_dir() else f"uv pip install {package}"
            raise EnvironmentLoadError(
                f"orchestrator.env id {env.id!r} is not installed (no module {module!r}); install it with: {command}"
            )
