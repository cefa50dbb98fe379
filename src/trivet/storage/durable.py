"""Writes files that survive a crash: synced to disk, renamed into place, identified by their digests.

Weights, checkpoints and readers' acknowledgements are written with these functions, which do not depend on the files' content.
"""

import errno
import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import msgspec
import xxhash

DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors that msgspec raises for bytes that are not JSON of the expected type. The second is for text that is not UTF-8, the
third for deep nesting."""

_CHUNK_BYTES = 8 << 20
"""Bytes that are read at one time to compute a digest."""
PRIVATE_MODE = 0o600
_FILE_MODE = 0o644
"""Mode of all other files, so that other users and containers can read weights, also where a library has set another mode."""


class FileRecord(msgspec.Struct, frozen=True):
    """Size and digest of one file.

    A record shows damage, not forgery, because whoever can change a file can change its record.
    """

    num_bytes: int
    xxh3_128: str
    """XXH3 with 128 bits, in hexadecimal. It is ten times as fast as SHA-256 on processors with instructions for SHA-256.

    Source: github.com/Cyan4973/xxHash, doc/xxhash_spec.md.
    """


def hash_file(path: Path) -> FileRecord:
    """Return size and digest of a file. Bytes that are appended after the file was opened are not read."""
    digest, num_bytes = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        while chunk := file.read(min(_CHUNK_BYTES, size - num_bytes)):
            digest.update(chunk)
            num_bytes += len(chunk)
    return FileRecord(num_bytes=num_bytes, xxh3_128=digest.hexdigest())


def hash_bytes(content: bytes) -> FileRecord:
    """Return the record of a file that holds `content`."""
    return FileRecord(num_bytes=len(content), xxh3_128=xxhash.xxh3_128_hexdigest(content))


def hash_files(directory: Path, names: Iterable[str]) -> dict[str, FileRecord]:
    """Hash files, given by their paths relative to `directory`, in parallel."""
    ordered = sorted(names)
    with ThreadPoolExecutor() as executor:
        return dict(zip(ordered, executor.map(lambda name: hash_file(directory / name), ordered), strict=True))


def digest_of(files: Mapping[str, FileRecord]) -> str:
    """Return one SHA-256 over the sorted names, sizes and digests of `files`."""
    lines = [f"{name} {record.num_bytes} {record.xxh3_128}" for name, record in sorted(files.items())]
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()


def explain_difference(directory: Path, files: Mapping[str, FileRecord]) -> str | None:
    """Describe the first difference between `directory` and the recorded `files`; return None if every byte is as recorded."""
    for name, expected in files.items():
        path = directory / name
        if not path.is_file():
            return f"{path} is missing; {expected.num_bytes} bytes were recorded"
        found = path.stat().st_size
        if found != expected.num_bytes:
            return f"{path} has {found} bytes; {expected.num_bytes} were recorded"
        if hash_file(path) != expected:
            return f"{path} does not match its recorded digest: the file was altered"
    return None


def list_files(directory: Path) -> list[str]:
    """Return every file below `directory`, hidden ones included, as a sorted list of relative paths."""
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


def is_listed(path: Path) -> bool:
    """Return whether `path` exists, by listing its directory and the directory above. Used for files of other machines.

    After a lookup of an absent name, a shared file system such as NFS treats the name as absent for up to a minute. A listing is
    newer.
    """

    def is_in_listing(name: Path) -> bool:
        try:
            return name in name.parent.iterdir() if name.name not in ("", "..") else name.exists()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except PermissionError:  # a directory that cannot be listed may still allow lookups
            return name.exists()

    return is_in_listing(path.parent) and is_in_listing(path)


def sync_directory(path: Path) -> None:
    """Wait until the names in `path` are on disk: a created, renamed or removed entry is durable only then."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(directory: Path) -> None:
    """Sync `directory` and every file and directory below it, and make the files readable for everyone."""
    for parent, _, names in os.walk(directory, topdown=False):
        for name in names:
            path = Path(parent, name)
            path.chmod(_FILE_MODE)
            with path.open("rb") as file:
                os.fsync(file.fileno())
        sync_directory(Path(parent))


def write_atomically(path: Path, data: bytes, *, is_private: bool = False) -> None:
    """Write `path` so that a reader, or a restart after a crash, finds the old content or the new one. Syncs to disk.

    Args:
        is_private: nobody but the owner may read the file.
    """
    _replace(path, data, does_sync=True, mode=PRIVATE_MODE if is_private else _FILE_MODE)
    sync_directory(path.parent)


def write_first(path: Path, data: bytes, *, is_private: bool = False) -> None:
    """Write `path` as `write_atomically` does, unless it exists. If several processes call it at once, one of them writes."""
    own_file = path.with_name(f"{path.name}.{_unique()}")
    write_atomically(own_file, data, is_private=is_private)
    try:
        os.link(own_file, path)
    except FileExistsError:
        pass
    finally:
        own_file.unlink()


def replace_file(path: Path, data: bytes) -> None:
    """Replace `path` as `write_atomically` does, but do not wait for the disk. For files that are not needed after a crash."""
    _replace(path, data, does_sync=False, mode=_FILE_MODE)


def write_private(path: Path, text: str) -> None:
    """Write a new file that nobody but its owner can read at any moment."""
    with open(path, "x", opener=_open_private) as file:
        file.write(text)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, PRIVATE_MODE)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Any other kind of file is an OSError: a pipe, for example, would wait for a writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def _replace(path: Path, data: bytes, *, does_sync: bool, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{_unique()}.tmp")
    with open(temporary, "wb", opener=_open_private) as file:
        file.write(data)
        if does_sync:
            file.flush()
            os.fsync(file.fileno())
    temporary.chmod(mode)
    temporary.replace(path)


def _unique() -> str:
    """Return letters that no other file has, whatever machine wrote it: containers may share host names and process ids."""
    return secrets.token_hex(8)


def write_json_atomically(path: Path, value: object) -> None:
    """Write `value` as JSON: a struct, or mappings, lists, strings and numbers."""
    write_atomically(path, format_json(value))


def format_json(value: object) -> bytes:
    """Return the bytes that `write_json_atomically` writes."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def remove_directory(directory: Path, *, marker: str | None = None) -> None:
    """Remove `directory`, if it exists, so that no reader sees it partly removed.

    First the `marker`, the file that makes the directory valid, is removed. Then the directory is renamed and its content removed.
    After a crash the rest of it has a name that starts with a dot and ends in `.removed`, and `sweep_removed` removes it.
    """
    if not directory.exists():
        return
    if marker is not None:
        (directory / marker).unlink(missing_ok=True)
        sync_directory(directory)
    renamed = directory.with_name(f".{directory.name.lstrip('.')}.{os.getpid()}.removed")
    shutil.rmtree(renamed, ignore_errors=True)
    directory.rename(renamed)
    sync_directory(directory.parent)
    shutil.rmtree(renamed)


def sweep_removed(parent: Path) -> None:
    """Finish the removals of directories in `parent` that a crash has interrupted (`remove_directory`)."""
    for path in parent.glob(".*.removed"):
        shutil.rmtree(path)
