"""Loads verifiers environments; what a user's load_environment raises becomes one error that names it."""

import verifiers as vf

from trivet.config.orchestrator import EnvConfig
from trivet.environments.installed import require_installed
from trivet.errors import EnvironmentLoadError


def load_environment(config: EnvConfig) -> vf.Environment:
    """
    Raises:
        EnvironmentLoadError: the package is not installed, or its load_environment raised.
    """
    require_installed(config)
    try:
        return vf.load_environment(config.id, **config.args)
    except Exception as exc:  # an environment is the user's code: whatever it raises is reported with its name
        cause = exc.__cause__ or exc
        raise EnvironmentLoadError(
            f"load_environment of {config.id!r} with args {config.args} raised {type(cause).__name__}: {cause}; "
            "check [[orchestrator.env]] args against the signature of its load_environment"
        ) from exc
