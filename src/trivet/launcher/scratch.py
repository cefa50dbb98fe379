"""Temporary files of a run's processes. A process that is killed leaves its own: vLLM its sockets, torchrun its directories."""

import getpass
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from trivet.config.layout import RunLayout
from trivet.durable import write_atomically

_PREFIX = "trivet-run-"


@contextmanager
def scratch_directory(layout: RunLayout) -> Iterator[Path]:
    """A new directory under the system's for temporary files, short enough for sockets, removed at the end with all it holds.

    For whoever holds the output directory: it notes the path there, and removes first what a launcher that was killed left.
    """
    _remove_noted(layout)
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        write_atomically(layout.scratch_note, f"{directory}\n".encode())
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        layout.scratch_note.unlink(missing_ok=True)


def scratch_environment(environ: Mapping[str, str], directory: Path) -> dict[str, str]:
    """`environ` with `directory` for temporary files; what torch has compiled stays where the next run finds it."""
    kept = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
    return {"TORCHINDUCTOR_CACHE_DIR": str(kept), **environ, "TMPDIR": str(directory)}


def _remove_noted(layout: RunLayout) -> None:
    try:
        noted = Path(layout.scratch_note.read_text().strip())
        is_ours = noted.name.startswith(_PREFIX) and noted.stat().st_uid == os.getuid()
    except OSError:
        return
    if is_ours and not noted.is_symlink():
        shutil.rmtree(noted, ignore_errors=True)
