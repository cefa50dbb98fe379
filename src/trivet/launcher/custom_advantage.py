"""Tries a custom advantage function before anything is started, in a process of its own: it is the user's code."""

import subprocess

from trivet.config.sections.curriculum import AdvantageConfig
from trivet.errors import ConfigError
from trivet.process.lifetime import module_command, tied_command

_TIMEOUT_S = 120.0
"""Importing what the user's module imports may take a while."""


def require_advantage(config: AdvantageConfig) -> None:
    """Call the function that the user configured with a few rewards; nothing for the built-in ones.

    Raises:
        ConfigError: the function cannot be imported, or does not return what can be trained on.
    """
    if config.type != "custom":
        return
    try:
        done = subprocess.run(
            tied_command(module_command("trivet.orchestrator.advantage")),
            input=config.model_dump_json(),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise ConfigError(
            f'orchestrator.advantage.import_path "{config.import_path}" was tried and did not end within {_TIMEOUT_S:.0f} s;'
            " does its module wait for something?"
        ) from exc
    if done.returncode:
        raise ConfigError(done.stderr.strip())
