"""Shows a directory in its own place through FUSE, every call as late as a file says: a shared file system on a bad day.

    python slow_directory_program.py DIRECTORY SECONDS_FILE

Locks reach the directory behind it, and what others write is seen up to `_CACHED_S` late, as on NFS: a name that was absent when it
was asked for stays absent for that long. Needs root and mfusepy; only the mount namespace of this process sees it.
"""

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable
from fcntl import flock
from pathlib import Path
from typing import Any

os.environ.setdefault("FUSE_LIBRARY_NAME", "fuse3")  # libfuse 2 mounts over empty directories alone

import mfusepy as fuse

_CACHED_S = 3.0


def late(files: type["SlowDirectory"]) -> type["SlowDirectory"]:
    """Delay every call of the file system."""
    for name, call in [(name, call) for name, call in vars(files).items() if callable(call) and not name.startswith("_")]:

        @functools.wraps(call)
        def delayed(self: "SlowDirectory", *args: Any, call: Callable[..., Any] = call, **named: Any) -> Any:
            with contextlib.suppress(OSError, ValueError):  # there is no delay now
                time.sleep(float(self.seconds_file.read_text()))
            return call(self, *args, **named)

        setattr(files, name, delayed)
    return files


@late
class SlowDirectory(fuse.Operations):
    """The files of an open directory, with a delay before every call."""

    use_ns = True

    def __init__(self, root: Path, seconds_file: Path) -> None:
        self._root = root
        self.seconds_file = seconds_file

    def _at(self, path: str) -> Path:
        return self._root / path.lstrip("/")

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        found = self._at(path).stat(follow_symlinks=path == "/")  # the root is a link among the descriptors
        names = ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_ino", "st_blocks")
        times = {f"st_{name}": getattr(found, f"st_{name}_ns") for name in ("atime", "mtime", "ctime")}
        return {name: getattr(found, name) for name in names} | times

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *(entry.name for entry in self._at(path).iterdir())]

    def open(self, path: str, flags: int) -> int:
        return os.open(self._at(path), flags & ~os.O_APPEND)

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return os.open(self._at(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(self._at(path) if fh is None else fh, length)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        os.fsync(fh)
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def flush(self, path: str, fh: int) -> int:
        return 0

    def flock(self, path: str, fh: int, op: int) -> int:
        flock(fh, op)
        return 0

    def readlink(self, path: str) -> str:
        return str(self._at(path).readlink())

    def symlink(self, target: str, source: str) -> int:
        self._at(target).symlink_to(source)
        return 0

    def link(self, target: str, source: str) -> int:
        self._at(target).hardlink_to(self._at(source))
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        self._at(path).mkdir(mode)
        return 0

    def rmdir(self, path: str) -> int:
        self._at(path).rmdir()
        return 0

    def unlink(self, path: str) -> int:
        self._at(path).unlink()
        return 0

    def rename(self, old: str, new: str) -> int:
        self._at(old).rename(self._at(new))
        return 0

    def chmod(self, path: str, mode: int) -> int:
        self._at(path).chmod(mode)
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        os.utime(self._at(path), ns=times)
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._root)
        names = ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_favail", "f_ffree", "f_files", "f_frsize", "f_namemax")
        return {name: getattr(found, name) for name in names}


def main(directory: str, seconds_file: str) -> int:
    root, late_by = Path(f"/proc/self/fd/{os.open(directory, os.O_RDONLY | os.O_DIRECTORY)}"), Path(seconds_file)
    absent_s = float(os.environ.get("ABSENT_S", _CACHED_S))
    times = {"attr_timeout": _CACHED_S, "entry_timeout": _CACHED_S, "negative_timeout": absent_s}
    fuse.FUSE(SlowDirectory(root, late_by), directory, foreground=True, **times)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
