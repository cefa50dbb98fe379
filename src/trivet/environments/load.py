"""Finds and loads verifiers environments. An unknown id is an error that says the command that installs it."""

import importlib.util
from pathlib import Path

import verifiers as vf
from verifiers.legacy.utils.env_utils import env_module_name

from trivet.config.orchestrator import EnvConfig
from trivet.errors import EnvironmentLoadError


def is_installed(env_id: str) -> bool:
    return importlib.util.find_spec(env_module_name(env_id)) is not None


def install_hint(env_id: str, *, environments_dir: Path = Path("environments")) -> str:
    """The command that installs `env_id`: from the folder of this checkout when it is there, else by package name."""
    folder = environments_dir / env_module_name(env_id)
    return f"uv pip install -e {folder}" if folder.is_dir() else f"uv pip install {env_id.split('/')[-1]}"


def load_environment(config: EnvConfig) -> vf.Environment:
    """
    Raises:
        EnvironmentLoadError: the package is not installed, or its load_environment raised.
    """
    if not is_installed(config.id):
        raise EnvironmentLoadError(
            f"environment {config.id!r} is not installed (no module {env_module_name(config.id)!r}); "
            f"install it with: {install_hint(config.id)}"
        )
    try:
        return vf.load_environment(config.id, **config.args)
    except Exception as exc:  # an environment is the user's code: whatever it raises is reported with its name
        cause = exc.__cause__ or exc
        raise EnvironmentLoadError(
            f"load_environment of {config.id!r} with args {config.args} raised {type(cause).__name__}: {cause}; "
            "check [[orchestrator.env]] args against the signature of its load_environment"
        ) from exc
