"""Writes one large file from front to back and computes its digest, bypassing the page cache if the file system allows it.

Called by `trainer.checkpoint.shard_writer`, while training goes on. A buffered write copies every byte into the page cache and
reads it again for the digest. The copy takes more processor time than the rest of a checkpoint, and slows training down. With
direct writes (O_DIRECT) the disk reads the caller's memory instead. The commit gives the file its final name, not this module.
"""

import errno
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import xxhash

from trivet.storage.durable import FileRecord

_ALIGNMENT = 4096
"""Alignment in bytes that direct writes need for file offsets and memory addresses. No disk needs more."""
_BUFFER_BYTES = 1 << 20
"""Size of the buffer for data that is copied. The buffer is written when it is full. 1 MiB holds the archive headers and small
tensors of many layers, so that they do not cause writes of their own, and it still fits the cache of a core."""
_DIRECT_BYTES = 64 << 10
"""Data of fewer bytes is copied into the buffer. A copy of 64 KiB takes some microseconds. A part of its own costs about as much:
up to a block of zeros for its alignment, and an entry in the list of parts."""
_WRITE_BYTES = 32 << 20
"""Largest number of bytes in one write. While a direct write runs, the kernel pins its pages in memory: 32 MiB bounds them. It is a
judgement, not a measurement; a disk reaches its full rate with much smaller writes."""
_MAX_PARTS = 512
"""Number of parts beyond which they are written. It is half of what Linux accepts in one write (IOV_MAX, 1024)."""


class FileStream:
    """An append-only file. After `flush` the caller may change the data that it passed to `write`."""

    def __init__(self, path: Path) -> None:
        """Create the file.

        Args:
            path: the new file, which must not exist.

        Raises:
            OSError: the file exists or cannot be created.
        """
        self._path = path
        self._hash = xxhash.xxh3_128()
        self._buffer = memoryview(mmap.mmap(-1, _BUFFER_BYTES))
        self._parts: list[memoryview] = []
        """Parts to write next, in order: pieces of the buffer and of callers' memory, each a multiple of `_ALIGNMENT` long."""
        self._begin, self._end = 0, 0
        """Bounds of the bytes in the buffer that belong after `_parts`."""
        self.num_unwritten_bytes = 0
        """Number of bytes in callers' memory that are not written yet."""
        self._num_whole = 0
        """Number of bytes written or in `_parts`."""
        self._num_written = 0
        """Number of bytes written: the file offset of the next write."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            self._fd = os.open(path, flags | os.O_DIRECT, 0o644)
        except OSError as exc:
            if exc.errno != errno.EINVAL:
                raise
            # The file system has no direct writes. Some create the empty file before they raise the error.
            path.unlink(missing_ok=True)
            self._fd = os.open(path, flags, 0o644)

    def __enter__(self) -> "FileStream":
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file, even if it is incomplete."""
        os.close(self._fd)

    @property
    def position(self) -> int:
        """Offset at which the next `write` begins, with zeros for alignment or with its own data."""
        return self._num_whole + self._end - self._begin

    def write(self, data: bytes | memoryview, *, prefix: bytes = b"", suffix: bytes = b"") -> int:
        """Append `prefix`, `data` and `suffix`; return the file offset of `prefix`.

        `data` must not change until the next `flush`. Zeros may precede `prefix` in the file: they align long data with the
        disk's blocks, so that it is written without a copy.

        Args:
            data: must be contiguous in memory.

        Raises:
            OSError: a write failed.
        """
        rest = memoryview(data).cast("B")
        if len(rest) < _DIRECT_BYTES:
            start = self.position
            self._append(b"".join((prefix, rest, suffix)))
            return start
        address = np.frombuffer(rest, dtype=np.uint8).__array_interface__["data"][0]
        zeros = bytes((address - self.position - len(prefix)) % _ALIGNMENT)
        start = self.position + len(zeros)
        # Bytes before the first aligned address of `data` are copied. The zeros align the file offset at the same byte.
        num_unaligned = -address % _ALIGNMENT
        self._append(b"".join((zeros, prefix, rest[:num_unaligned])))
        num_direct = (len(rest) - num_unaligned) // _ALIGNMENT * _ALIGNMENT
        self._end_part()
        self._add_part(rest[num_unaligned : num_unaligned + num_direct])
        self.num_unwritten_bytes += num_direct
        self._append(b"".join((rest[num_unaligned + num_direct :], suffix)))
        if len(self._parts) > _MAX_PARTS:
            self.flush()
        return start

    def flush(self) -> None:
        """Write everything except a last partial block. Afterwards callers may change the memory that they passed to `write`.

        Raises:
            OSError: a write failed.
        """
        num_left = (self._end - self._begin) % _ALIGNMENT
        left = bytes(self._buffer[self._end - num_left : self._end])
        self._end -= num_left
        self._end_part()
        for part in self._parts:
            self._hash.update(part)
        self._write_out(self._parts)
        self._parts, self.num_unwritten_bytes = [], 0
        self._begin, self._end = 0, num_left
        self._buffer[:num_left] = left

    def finish(self) -> FileRecord:
        """Write the rest and sync the file to disk; return its size and digest."""
        self.flush()
        num_bytes, num_left = self.position, self._end
        self._hash.update(self._buffer[:num_left])
        # A direct write needs whole blocks: pad with zeros, then cut them off.
        self._append(bytes(-num_left % _ALIGNMENT))
        self._write_out([self._buffer[: self._end]])
        os.ftruncate(self._fd, num_bytes)
        os.fsync(self._fd)
        return FileRecord(num_bytes=num_bytes, xxh3_128=self._hash.hexdigest())

    def _append(self, data: bytes) -> None:
        """Copy `data` into the buffer; flush whenever the buffer is full."""
        taken = 0
        while taken < len(data):
            if self._end == _BUFFER_BYTES:
                self.flush()
            num_bytes = min(len(data) - taken, _BUFFER_BYTES - self._end)
            self._buffer[self._end : self._end + num_bytes] = data[taken : taken + num_bytes]
            self._end, taken = self._end + num_bytes, taken + num_bytes

    def _end_part(self) -> None:
        """Turn the bytes in the buffer into a part. Their number must be a multiple of `_ALIGNMENT`."""
        self._add_part(self._buffer[self._begin : self._end])
        self._begin = self._end

    def _add_part(self, part: memoryview) -> None:
        if part:
            self._parts.append(part)
            self._num_whole += len(part)

    def _write_out(self, parts: Sequence[memoryview]) -> None:
        pending = deque(parts)
        while pending:
            try:
                num_bytes = os.pwritev(self._fd, _first_of(pending), self._num_written)
            except OSError as exc:
                if exc.errno != errno.EINVAL or not self._make_indirect():
                    raise
                continue
            self._num_written += num_bytes
            while pending and num_bytes >= len(pending[0]):
                num_bytes -= len(pending.popleft())
            if num_bytes:
                pending[0] = pending[0][num_bytes:]

    def _make_indirect(self) -> bool:
        """Switch to writes through the page cache; return False if the file uses it already."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return bool(flags & os.O_DIRECT)


def _first_of(parts: Iterable[memoryview]) -> list[memoryview]:
    """Return the first parts, up to `_WRITE_BYTES` in all; the last one may be cut."""
    taken: list[memoryview] = []
    num_left = _WRITE_BYTES
    for part in parts:
        taken.append(part[:num_left])
        num_left -= len(taken[-1])
        if not num_left:
            break
    return taken
