"""Gives each worker a directory for its temporary files, which goes with it, and removes the containers that the worker left.

No signal reaches a container: an engine's daemon is its parent. verifiers labels each container with the variable `SCOPE`. A worker
that is about to start one notes the engine in its directory, whose name is the label. Whoever removes the directory removes the
containers before. A later pool does so for workers whose pool was killed.
"""

import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from trivet.process.lock import lock_directory, remove_if_free

logger = logging.getLogger(__name__)

SCOPE = "VF_RUN_ID"
"""Variable of a worker with the name of its directory, which verifiers gives its containers as a label."""
APPTAINER = "apptainer"
"""The engine that knows no labels: the names of its instances begin with that of the directory."""

_PREFIX = "trivet-worker-"
_LABEL = "verifiers.run"
_NOTE = "container-engines"
_TIMEOUT_S = 30.0
"""For one command of an engine. One that hangs must not hold up the end of a run."""


class WorkerDirectory:
    """A new directory of this user alone. It is locked as long as this process lives, so that no other pool removes it."""

    def __init__(self) -> None:
        """Make the directory; raises OSError when there is no place for temporary files."""
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock = lock_directory(self.path)

    def remove(self) -> None:
        """Remove the worker's containers and the directory, once nothing of the worker runs any more. May be called again."""
        if self._lock >= 0:
            remove_containers(self.path)
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def sweep_directories() -> int:
    """Remove the directories of workers whose pool was killed, and their containers; return how many containers there were."""
    removed: list[int] = []
    for directory in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        remove_if_free(directory, before=lambda path: removed.append(remove_containers(path)))
    return sum(removed)


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
