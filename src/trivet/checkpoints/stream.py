"""Writes one large file front to back, past the page cache where the file system allows it, and digests it on the way.

Called by whoever writes the trainer's shards. It exists because of what the ordinary way costs the training beside it: every
byte is copied into new pages of the cache, which takes more processor time than everything else about a checkpoint, and read
again for its digest. Here the disk reads the caller's memory. It never makes a file visible under its final name: that is the
commit's part.
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

from trivet.durable import FileRecord

_ALIGNMENT = 4096
"""Alignment of offsets and addresses of direct writes, in bytes; no disk asks for more."""
_BUFFER_BYTES = 1 << 20
"""Memory for data that is copied; it is written when it is full."""
_DIRECT_BYTES = 64 << 10
"""Shorter data is copied: that costs less than a write of its own."""
_WRITE_BYTES = 32 << 20
"""Limit of one write."""
_MAX_PARTS = 512
"""Limit of one write's parts: half of what Linux takes."""


class FileStream:
    """A file that grows at its end.

    >>> with FileStream(path) as stream:
    ...     offset = stream.write(data, before=header)
    ...     stream.flush()  # `data` may change
    ...     record = stream.finish()
    """

    def __init__(self, path: Path) -> None:
        """Create the file.

        Args:
            path: does not exist yet.

        Raises:
            OSError: it cannot be created.
        """
        self._path = path
        self._hash = xxhash.xxh3_128()
        self._buffer = memoryview(mmap.mmap(-1, _BUFFER_BYTES))
        self._parts: list[memoryview] = []
        """The next parts of the file, of the buffer and of callers' memory, each a multiple of the alignment."""
        self._begin, self._end = 0, 0
        """Bounds in the buffer of the bytes after these parts."""
        self.num_waiting = 0
        """Bytes of callers' memory that were not written yet."""
        self._num_whole = 0
        """Bytes in `_parts` and before them."""
        self._num_written = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            self._fd = os.open(path, flags | os.O_DIRECT, 0o644)
        except OSError as exc:
            if exc.errno != errno.EINVAL:
                raise
            # The file system has no direct writes; some leave the empty file behind when they say so.
            path.unlink(missing_ok=True)
            self._fd = os.open(path, flags, 0o644)

    def __enter__(self) -> "FileStream":
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file, whole or not."""
        os.close(self._fd)

    @property
    def position(self) -> int:
        """Offset of the next byte, or of the zeros before it."""
        return self._num_whole + self._end - self._begin

    def write(self, data: bytes | memoryview, *, before: bytes = b"", after: bytes = b"") -> int:
        """Append the three; returns where `before` begins. The memory of `data` is needed until the next `flush`.

        Zeros come first where they let long data go to the disk without a copy.

        Args:
            data: contiguous.

        Raises:
            OSError: the disk refused.
        """
        rest = memoryview(data).cast("B")
        if len(rest) < _DIRECT_BYTES:
            start = self.position
            self._append(b"".join((before, rest, after)))
            return start
        address = np.frombuffer(rest, dtype=np.uint8).__array_interface__["data"][0]
        zeros = bytes((address - self.position - len(before)) % _ALIGNMENT)
        start = self.position + len(zeros)
        # Up to the next page of the memory and of the file, which are the same from here on.
        num_before = -address % _ALIGNMENT
        self._append(b"".join((zeros, before, rest[:num_before])))
        num_direct = (len(rest) - num_before) // _ALIGNMENT * _ALIGNMENT
        self._end_part()
        self._add_part(rest[num_before : num_before + num_direct])
        self.num_waiting += num_direct
        self._append(b"".join((rest[num_before + num_direct :], after)))
        if len(self._parts) > _MAX_PARTS:
            self.flush()
        return start

    def flush(self) -> None:
        """Return once nobody's memory is needed any more.

        Raises:
            OSError: the disk refused.
        """
        num_left = (self._end - self._begin) % _ALIGNMENT
        left = bytes(self._buffer[self._end - num_left : self._end])
        self._end -= num_left
        self._end_part()
        for part in self._parts:
            self._hash.update(part)
        self._write_out(self._parts)
        self._parts, self.num_waiting = [], 0
        self._begin, self._end = 0, num_left
        self._buffer[:num_left] = left

    def finish(self) -> FileRecord:
        """Write the rest, and return once everything is on disk."""
        self.flush()
        num_bytes, num_left = self.position, self._end
        self._hash.update(self._buffer[:num_left])
        self._append(bytes(-num_left % _ALIGNMENT))
        self._write_out([self._buffer[: self._end]])
        os.ftruncate(self._fd, num_bytes)
        os.fsync(self._fd)
        return FileRecord(num_bytes=num_bytes, xxh3_128=self._hash.hexdigest())

    def _append(self, data: bytes) -> None:
        taken = 0
        while taken < len(data):
            if self._end == _BUFFER_BYTES:
                self.flush()
            num_bytes = min(len(data) - taken, _BUFFER_BYTES - self._end)
            self._buffer[self._end : self._end + num_bytes] = data[taken : taken + num_bytes]
            self._end, taken = self._end + num_bytes, taken + num_bytes

    def _end_part(self) -> None:
        """Make a part of what is in the buffer, which is a multiple of the alignment."""
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
        """Write through the page cache from here on; false if that is so already."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return bool(flags & os.O_DIRECT)


def _first_of(parts: Iterable[memoryview]) -> list[memoryview]:
    """Return as much of the beginning as one write takes."""
    taken: list[memoryview] = []
    room = _WRITE_BYTES
    for part in parts:
        taken.append(part[:room])
        room -= len(taken[-1])
        if not room:
            break
    return taken
