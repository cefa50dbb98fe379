"""Gives each worker a directory for its temporary files, which goes with it, and removes what a pool that was killed left.

The containers that the worker started go with the directory (`workers.containers`).
"""

import os
import shutil
import tempfile
from pathlib import Path

from trivet.environments.workers.containers import remove_containers
from trivet.process.lock import lock_directory, remove_if_free

_PREFIX = "trivet-worker-"


class WorkerDirectory:
    """A new directory of this user alone. It is locked as long as this process lives, so that no other pool removes it."""

    def __init__(self) -> None:
        """Make the directory.

        Raises:
            OSError: there is no place for temporary files.
        """
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
