"""Checks the free disk space before large files are written, and explains a disk that is full.

Used where weights and checkpoints are written, and by `config.command` for all other files. It removes nothing.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trivet.errors import DiskFull
from trivet.key_names import key_name, list_keys

_FULL_DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FULL_DISK_TEXTS = tuple(
    text for number in _FULL_DISK_ERRNOS for text in (f"[Errno {number}]", f"os error {number})", os.strerror(number))
)
"""Texts by which a full disk is recognized in errors of libraries that do not raise an OSError."""

_GIB = 2**30


def free_bytes(path: Path) -> int:
    """Return how many bytes can be written below `path`, which need not exist yet."""
    existing = path
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def require_free_space(path: Path, num_bytes: int, *, what: str) -> None:
    """Refuse to write `num_bytes` below `path` if fewer are free. `what` names the content in the error."""
    free = free_bytes(path)
    if free < num_bytes:
        raise DiskFull(_explain(path, what=what, needed=num_bytes, free=free))


@contextmanager
def explaining_full_disk(path: Path, *, what: str, num_bytes: int | None = None) -> Iterator[None]:
    """Turn an error of any type that a full disk causes in the block into a DiskFull. Other errors pass unchanged."""
    try:
        yield
    except DiskFull:
        raise
    except BaseException as exc:  # torch raises an error that is not an Exception for a failed write
        if not is_full_disk(exc):
            raise
        raise DiskFull(_explain(path, what=what, needed=num_bytes, free=free_bytes(path))) from exc


def is_full_disk(error: BaseException) -> bool:
    """Return whether `error`, or an error that caused it, is about a full disk or quota."""
    current: BaseException | None = error
    while current is not None:
        is_errno = isinstance(current, OSError) and current.errno in _FULL_DISK_ERRNOS
        if is_errno or any(text in str(current) for text in _FULL_DISK_TEXTS):
            return True
        current = current.__cause__ or current.__context__
    return False


def describe_full_disk(error: OSError) -> str:
    """Return the message for a failed write of a file whose content is not known here."""
    path = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else Path.cwd()
    return _explain(path, what="a file", needed=None, free=free_bytes(path))


def format_bytes(num_bytes: int) -> str:
    """Return a size as text: in GiB, or in MiB below a tenth of a GiB."""
    return f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB // 10 else f"{num_bytes / 2**20:.1f} MiB"


def _explain(path: Path, *, what: str, needed: int | None, free: int) -> str:
    amount = "" if needed is None else f"{format_bytes(needed)} needed, "
    return (
        f"not enough free disk space to write {what} in {path}: {amount}{format_bytes(free)} free. What was committed before is "
        f"whole. Free disk space, or keep less: set {key_name('ckpt.keep_last')}, or raise "
        f"{list_keys('ckpt.interval', 'ckpt.weights.interval')}; then go on with {key_name('ckpt.resume_step = -1')}"
    )
