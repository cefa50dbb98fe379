"""Keeps the temporary files of servers and ranks. A process that is killed leaves its own: vLLM its sockets, ranks their directory.

The orchestrator keeps to the directory that the user has for such files. Its environment workers have directories of their own.
"""

import os
import shutil
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from trivet.errors import ConfigError
from trivet.launcher.plan import ORCHESTRATOR, ProcessSpec
from trivet.machine import compile_cache_directory
from trivet.process.lock import lock_directory, remove_if_free
from trivet.storage.durable import write_atomically

_PREFIX = "trivet-"
_MAX_LENGTH = 70
"""Characters of the directory's path: a socket's path may have 107, of which vLLM's name takes 37."""


class Scratch:
    """A new directory that is removed at the end of the run with all that it holds. For the holder of the output directory.

    Its path is noted there: the next run removes what a launcher that was killed left, if no other run is in it.
    """

    def __init__(self, note: Path) -> None:
        self._note = note
        self._held = ExitStack()

    def __enter__(self) -> "Scratch":
        """Make the directory, and remove the one that a killed launcher left.

        Raises:
            ConfigError: there is no directory for temporary files.
        """
        with suppress(OSError):  # mostly there is none
            left = Path(self._note.read_text().strip())
            if left.name.startswith(_PREFIX):
                remove_if_free(left)
        with ExitStack() as begun:
            try:
                self.directory = _make_directory()
                begun.callback(shutil.rmtree, self.directory, ignore_errors=True)
                begun.callback(os.close, lock_directory(self.directory))
            except OSError as exc:
                raise ConfigError(f"no temporary directory can be made: {exc}; free disk space there, or set TMPDIR") from exc
            write_atomically(self._note, f"{self.directory}\n".encode())
            self._held = begun.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._held.close()
        if not self.directory.exists():
            with suppress(OSError):  # a note of what is gone harms nobody
                self._note.unlink()

    def redirect(self, spec: ProcessSpec) -> ProcessSpec:
        """Return `spec` with its temporary files here; what libraries keep there for the next run stays where that finds it."""
        if spec.name == ORCHESTRATOR:
            return spec
        return replace(
            spec, env={**spec.env, "TMPDIR": str(self.directory)}, env_defaults={**_kept_caches(), **spec.env_defaults}
        )


def _make_directory() -> Path:
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
    if len(str(directory)) <= _MAX_LENGTH:
        return directory
    directory.rmdir()
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"))


def _kept_caches() -> dict[str, str]:
    """Return the caches of torch, tiktoken and openai-harmony among temporary files, by the variable that names each."""
    root = Path(tempfile.gettempdir())
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(compile_cache_directory()),
        "DATA_GYM_CACHE_DIR": str(root / "data-gym-cache"),
        "TIKTOKEN_RS_CACHE_DIR": str(root / "tiktoken-rs-cache"),
    }
