"""Opens files of a run for clients on the network. Every file that `trivet view` reads is opened here.

No file outside the run's directory is ever opened, not even through a link, and nothing is written.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from trivet.errors import ConfigError
from trivet.storage.durable import open_regular

_CHUNK_BYTES = 1 << 22
"""Bytes that are read at once, which bounds the memory for a file that grew by gigabytes."""


class NotServed(ConfigError):
    """The request names a file that does not exist, or that does not belong to the run. The text is sent as the answer."""


@dataclass(frozen=True, slots=True)
class FileStamp:
    """A value that changes whenever the file does: when a line is appended, or another file gets the name."""

    inode: int
    num_bytes: int
    time_ns: int


def stamp_of(path: Path) -> FileStamp | None:
    """Return the file's stamp; None when there is no such file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return FileStamp(inode=found.st_ino, num_bytes=found.st_size, time_ns=found.st_mtime_ns)


def check_inside(root: Path, path: Path) -> Path:
    """Return the real path of `path`.

    Raises:
        NotServed: it does not exist, or leads out of `root`.
    """
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError) as exc:
        raise NotServed(f"the run has no {_name_in(root, path)}") from exc
    if not real.is_relative_to(root.resolve()):
        raise NotServed(f"{_name_in(root, path)} leads out of the run's directory and is not shown")
    return real


def is_inside(root: Path, path: Path) -> bool:
    """Return whether `path` exists and belongs to the run."""
    try:
        check_inside(root, path)
    except NotServed:
        return False
    return True


def open_inside(root: Path, path: Path) -> BinaryIO:
    """Open a file of the run.

    Raises:
        NotServed: as `check_inside`, or it cannot be read.
    """
    try:
        return open_regular(check_inside(root, path))
    except OSError as exc:
        raise NotServed(f"{_name_in(root, path)} cannot be read: {exc.strerror}") from exc


def read_inside(root: Path, path: Path) -> bytes:
    """Return the content of a file of the run. Raises as `open_inside`."""
    with open_inside(root, path) as file:
        return file.read()


class GrowingLines:
    """Reads each complete line of a growing file once."""

    def __init__(self, root: Path, path: Path) -> None:
        self._root, self._path = root, path
        self._offset = 0
        self._inode: int | None = None

    def was_replaced(self) -> bool:
        """Return whether the file was replaced or shortened, as by a resume. Then the next read starts at its beginning."""
        stamp = stamp_of(self._path)
        inode, num_bytes = (stamp.inode, stamp.num_bytes) if stamp is not None else (None, 0)
        is_replaced = self._inode is not None and (inode != self._inode or num_bytes < self._offset)
        if is_replaced:
            self._offset = 0
        self._inode = inode
        return is_replaced

    def read_new(self) -> Iterator[bytes]:
        """Yield the lines that were completed since the last call. An incomplete last line is left for a later call."""
        if stamp_of(self._path) is None:
            return
        with open_inside(self._root, self._path) as file:
            self._inode = os.fstat(file.fileno()).st_ino
            file.seek(self._offset)
            rest = b""
            while chunk := file.read(_CHUNK_BYTES):
                whole, newline, rest = (rest + chunk).rpartition(b"\n")
                self._offset += len(whole) + len(newline)
                yield from whole.split(b"\n") if newline else ()


def _name_in(root: Path, path: Path) -> str:
    """Return the path below `root`, by which messages name a file."""
    return str(path.relative_to(root)) if path.is_relative_to(root) else path.name
