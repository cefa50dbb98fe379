"""Removes the containers that a worker started and left. No signal reaches them: an engine's daemon is their parent.

verifiers labels each container with the variable `SCOPE`. A worker that is about to start one notes the engine in the directory of
its temporary files, whose name is the label. Whoever removes that directory removes the containers before.
"""

import logging
import subprocess
from pathlib import Path

logger = logging.getLogger(__name__)

SCOPE = "VF_RUN_ID"
"""Variable of a worker with the name of its directory, which verifiers gives its containers as a label."""
APPTAINER = "apptainer"
"""The engine that knows no labels: the names of its instances begin with that of the directory."""

_LABEL = "verifiers.run"
_NOTE = "container-engines"
_TIMEOUT_S = 30.0
"""For one command of an engine. One that hangs must not hold up the end of a run."""


def note_engine(directory: Path, engine: str) -> None:
    """Note in a worker's directory that it starts containers with `engine`."""
    note = directory / _NOTE
    if not note.exists() or engine not in note.read_text().split():
        with note.open("a") as file:
            file.write(f"{engine}\n")


def remove_containers(directory: Path) -> int:
    """Remove the containers of the worker that had `directory`; return how many there were. The worker has ended."""
    try:
        engines = (directory / _NOTE).read_text().split()
    except OSError:  # mostly it started none
        return 0
    return sum(_remove_of(engine, directory.name) for engine in engines)


def _remove_of(engine: str, scope: str) -> int:
    try:
        if engine == APPTAINER:
            # The first line has the names of the columns.
            found = _run(engine, "instance", "list", f"{scope}*").splitlines()[1:]
            remove = ("instance", "stop", "--force", f"{scope}*")
        else:
            found = _run(engine, "ps", "--all", "--quiet", "--filter", f"label={_LABEL}={scope}").split()
            remove = ("rm", "--force", *found)
        if found:
            _run(engine, *remove)
    except (OSError, subprocess.SubprocessError) as exc:
        logger.warning("containers of %s with the label %s=%s cannot be removed: %s", engine, _LABEL, scope, exc)
        return 0
    return len(found)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL, check=True)
    return done.stdout
