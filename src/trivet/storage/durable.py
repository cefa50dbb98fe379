"""Files that survive a crash: synced to disk, renamed into place, identified by their digests.

Weights, checkpoints and reader acknowledgements are written through here. Nothing here knows what the files mean.
"""

import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import msgspec
import xxhash

DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors that msgspec raises for bytes that are not JSON of a type: text that is no UTF-8 and deep nesting have their own."""

_CHUNK_BYTES = 8 << 20
PRIVATE_MODE = 0o600
_FILE_MODE = 0o644
"""Other users and containers that serve the weights can read them, whatever the writing library chose."""


class FileRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """Size and digest of one file; the digest's field is its algorithm.

    It finds bytes that were damaged, not bytes that someone forged: whoever can change a file can change its record.
    """

    num_bytes: int
    xxh3_128: str = ""
    """XXH3 with 128 bits, in hexadecimal: ten times as fast as SHA-256 where that has instructions of its own.

    Source: github.com/Cyan4973/xxHash, doc/xxhash_spec.md.
    """
    sha256: str = ""
    """SHA-256 in hexadecimal, written by versions that had no xxh3_128."""


def hash_file(path: Path) -> FileRecord:
    """Return size and digest of a file."""
    return FileRecord(*_digest(path, xxhash.xxh3_128()))


def hash_bytes(content: bytes) -> FileRecord:
    """Return the record of a file that holds `content`."""
    return FileRecord(num_bytes=len(content), xxh3_128=xxhash.xxh3_128_hexdigest(content))


def _digest(path: Path, algorithm: "hashlib._Hash | xxhash.xxh3_128") -> tuple[int, str]:
    """Return size and hexadecimal digest of `path`, as far as it went when it was opened: it may grow faster than it is read."""
    num_bytes = 0
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        while chunk := file.read(min(_CHUNK_BYTES, size - num_bytes)):
            algorithm.update(chunk)
            num_bytes += len(chunk)
    return num_bytes, algorithm.hexdigest()


def hash_files(directory: Path, names: Iterable[str]) -> dict[str, FileRecord]:
    """Hash files, given by their paths relative to `directory`, in parallel."""
    ordered = sorted(names)
    with ThreadPoolExecutor() as pool:
        return dict(zip(ordered, pool.map(lambda name: hash_file(directory / name), ordered), strict=True))


def digest_of(files: Mapping[str, FileRecord]) -> str:
    """Return one SHA-256 over the sorted names, sizes and digests of `files`."""
    lines = [f"{name} {record.num_bytes} {record.xxh3_128 or record.sha256}" for name, record in sorted(files.items())]
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()


def explain_difference(directory: Path, files: Mapping[str, FileRecord]) -> str | None:
    """Return how `directory` differs from the recorded `files`, or None when every byte is as recorded."""
    for name, expected in files.items():
        path = directory / name
        if not path.is_file():
            return f"{path} is missing; {expected.num_bytes} bytes were recorded"
        found = path.stat().st_size
        if found != expected.num_bytes:
            return f"{path} has {found} bytes; {expected.num_bytes} were recorded"
        algorithm = hashlib.sha256() if expected.sha256 else xxhash.xxh3_128()
        if _digest(path, algorithm)[1] != (expected.sha256 or expected.xxh3_128):
            return f"{path} does not match its recorded digest: the file was altered"
    return None


def list_files(directory: Path) -> list[str]:
    """Return every file below `directory`, hidden ones included, as a sorted list of relative paths."""
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


def is_listed(path: Path) -> bool:
    """Return whether `path` is there, by listings of its directory and of the one above. For names that other machines create.

    A shared file system such as NFS remembers for up to a minute that a name which was asked for is absent. A listing is newer.
    """

    def lists(name: Path) -> bool:
        try:
            return name in name.parent.iterdir() if name.name not in ("", "..") else name.exists()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except PermissionError:  # names in it may be asked for all the same
            return name.exists()

    return lists(path.parent) and lists(path)


def sync_directory(path: Path) -> None:
    """Wait until the names in `path` are on disk: a created, renamed or removed entry is durable only then."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(directory: Path) -> None:
    """Sync every file and directory below `directory`, and itself; files become readable for everyone."""
    for parent, _, names in os.walk(directory, topdown=False):
        for name in names:
            path = Path(parent, name)
            path.chmod(_FILE_MODE)
            with path.open("rb") as file:
                os.fsync(file.fileno())
        sync_directory(Path(parent))


def write_atomically(path: Path, data: bytes, *, is_private: bool = False) -> None:
    """Write `path` so that a reader, or a restart after a crash, finds the old content or the new; private: for its owner alone."""
    _replace(path, data, does_sync=True, mode=PRIVATE_MODE if is_private else _FILE_MODE)
    sync_directory(path.parent)


def write_first(path: Path, data: bytes, *, is_private: bool = False) -> None:
    """Write `path` as `write_atomically` does, unless it is there. Of several processes at one moment the first one writes."""
    own = path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}")
    write_atomically(own, data, is_private=is_private)
    try:
        os.link(own, path)
    except FileExistsError:
        pass
    finally:
        own.unlink()


def replace_file(path: Path, data: bytes) -> None:
    """Replace `path` as `write_atomically` does, without waiting for the disk: for what is worthless after a crash."""
    _replace(path, data, does_sync=False, mode=_FILE_MODE)


def write_private(path: Path, text: str) -> None:
    """Write a new file that nobody but its owner may read, not even for a moment."""
    with open(path, "x", opener=_open_private) as file:
        file.write(text)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, PRIVATE_MODE)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Opening a pipe would wait for whoever writes to it, so that is an OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def _replace(path: Path, data: bytes, *, does_sync: bool, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")
    with open(temporary, "wb", opener=_open_private) as file:
        file.write(data)
        if does_sync:
            file.flush()
            os.fsync(file.fileno())
    temporary.chmod(mode)
    temporary.replace(path)


def write_json_atomically(path: Path, value: object) -> None:
    """Write `value` as JSON: anything msgspec encodes, a struct, or mappings, lists, strings and numbers."""
    write_atomically(path, msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")


def remove_directory(directory: Path, *, marker: str | None = None) -> None:
    """Remove `directory`, if there, such that it is never seen partly removed.

    The `marker` that makes it valid goes first, then the name, then the content. What a crash leaves of the content has a
    name that starts with a dot and ends in `.removed`; `sweep_removed` takes it away.
    """
    if not directory.exists():
        return
    if marker is not None:
        (directory / marker).unlink(missing_ok=True)
        sync_directory(directory)
    aside = directory.with_name(f".{directory.name.lstrip('.')}.{os.getpid()}.removed")
    shutil.rmtree(aside, ignore_errors=True)
    directory.rename(aside)
    sync_directory(directory.parent)
    shutil.rmtree(aside)


def sweep_removed(parent: Path) -> None:
    """Finish removals in `parent` that a crash interrupted."""
    for path in parent.glob(".*.removed"):
        shutil.rmtree(path)
