"""Gives each worker a directory for its temporary files, which goes with it, and removes what a pool that was killed left."""

import os
import shutil
import tempfile
from pathlib import Path

from trivet.process.lock import lock_directory, remove_if_free

_PREFIX = "trivet-worker-"


class WorkerDirectory:
    """A new directory of this user alone. It is locked as long as this process lives, so that no other pool removes it.

    >>> directory = WorkerDirectory()
    >>> environ["TMPDIR"] = str(directory.path)
    >>> directory.remove()
    """

    def __init__(self) -> None:
        """Make the directory.

        Raises:
            OSError: there is no place for temporary files.
        """
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock = lock_directory(self.path)

    def remove(self) -> None:
        """Remove the directory with all that it holds, once nothing of the worker runs any more. May be called again."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def sweep_directories() -> None:
    """Remove the directories of workers whose pool was killed."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        remove_if_free(directory)
