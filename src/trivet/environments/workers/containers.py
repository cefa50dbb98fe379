"""Removes the containers that a worker started and left running. Signals do not reach them: an engine's daemon is their parent.

verifiers gives each container a label with the value of the variable `SCOPE`, which is the name of the worker's directory for
temporary files. Before a worker starts a container, it records the engine (docker, podman, apptainer) in a file of that directory.
Before a pool removes the directory, it removes the containers with that label from the recorded engines.
"""

import logging
import subprocess
from pathlib import Path

logger = logging.getLogger(__name__)

SCOPE = "VF_RUN_ID"
"""Variable of a worker with the name of its directory. verifiers gives its value to containers as a label."""
APPTAINER = "apptainer"
"""The engine that has no labels. The names of its instances begin with the name of the directory instead."""

_LABEL = "verifiers.run"
_ENGINES_FILE = "container-engines"
"""The file of a worker's directory that lists the engines which the worker used, one a line."""
_TIMEOUT_S = 30.0
"""Longest time for one command of an engine. A command that hangs must not delay the end of a run further."""


def record_engine(directory: Path, engine: str) -> None:
    """Record in a worker's directory that the worker starts containers with `engine`."""
    path = directory / _ENGINES_FILE
    if not path.exists() or engine not in path.read_text().split():
        with path.open("a") as file:
            file.write(f"{engine}\n")


def remove_containers(directory: Path) -> int:
    """Remove the containers of the worker that had `directory`, and has ended; return how many containers there were."""
    try:
        engines = (directory / _ENGINES_FILE).read_text().split()
    except OSError:  # most workers start no containers
        return 0
    return sum(_remove_from_engine(engine, directory.name) for engine in engines)


def _remove_from_engine(engine: str, scope: str) -> int:
    """Remove the containers of one engine with the label `scope`; return how many there were."""
    try:
        if engine == APPTAINER:
            # The first line has the names of the columns.
            containers = _run(engine, "instance", "list", f"{scope}*").splitlines()[1:]
            remove_command = ("instance", "stop", "--force", f"{scope}*")
        else:
            containers = _run(engine, "ps", "--all", "--quiet", "--filter", f"label={_LABEL}={scope}").split()
            remove_command = ("rm", "--force", *containers)
        if containers:
            _run(engine, *remove_command)
    except (OSError, subprocess.SubprocessError) as exc:
        logger.warning("containers of %s with the label %s=%s cannot be removed: %s", engine, _LABEL, scope, exc)
        return 0
    return len(containers)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL, check=True)
    return done.stdout
