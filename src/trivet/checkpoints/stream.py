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
from pathlib import Path

import numpy as np
import xxhash

from trivet.durable import FileRecord

_ALIGNMENT = 4096
"""Of offsets and of addresses that go to the disk directly; no disk asks for more."""
_BUFFER_BYTES = 1 << 20
_DIRECT_BYTES = 64 << 10
"""What is shorter is copied: it costs less than a write of its own."""
_WRITE_BYTES = 32 << 20
"""Longest single write."""


class FileStream:
    """A file that grows at its end.

    >>> with FileStream(path) as stream:
    ...     stream.align_with(data)
    ...     offset = stream.position
    ...     stream.write(data)
    ...     record = stream.finish()
    """

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: does not exist yet.

        Raises:
            OSError: it cannot be created.
        """
        self._path = path
        self._hash = xxhash.xxh3_128()
        self._buffer = mmap.mmap(-1, _BUFFER_BYTES)
        self._num_buffered = 0
        self._num_written = 0
        """Bytes that left the buffer; a multiple of the alignment until the end."""
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
        """Where the next byte goes."""
        return self._num_written + self._num_buffered

    def align_with(self, data: bytes | memoryview, *, after: int = 0) -> None:
        """Put zeros into the file until `data` can go to the disk from where it lies, once `after` bytes are written."""
        if memoryview(data).nbytes >= _DIRECT_BYTES:
            self.write(bytes((_address(data) - self.position - after) % _ALIGNMENT))

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`; returns when its memory is no longer needed.

        Args:
            data: contiguous. Goes to the disk without a copy if `align_with` was called for it.

        Raises:
            OSError: the disk refused.
        """
        rest = memoryview(data).cast("B")
        self._hash.update(rest)
        if len(rest) >= _DIRECT_BYTES and (_address(rest) - self.position) % _ALIGNMENT == 0:
            num_before = -self.position % _ALIGNMENT
            self._append(rest[:num_before])
            self._flush()
            num_direct = (len(rest) - num_before) // _ALIGNMENT * _ALIGNMENT
            self._write_out(rest[num_before : num_before + num_direct])
            rest = rest[num_before + num_direct :]
        self._append(rest)

    def finish(self) -> FileRecord:
        """Returns once everything is on disk."""
        num_bytes = self.position
        num_padding = -self._num_buffered % _ALIGNMENT
        self._buffer[self._num_buffered : self._num_buffered + num_padding] = bytes(num_padding)
        self._num_buffered += num_padding
        self._flush()
        os.ftruncate(self._fd, num_bytes)
        os.fsync(self._fd)
        return FileRecord(num_bytes=num_bytes, xxh3_128=self._hash.hexdigest())

    def _append(self, data: memoryview) -> None:
        while data:
            end = min(self._num_buffered + len(data), _BUFFER_BYTES)
            taken = end - self._num_buffered
            self._buffer[self._num_buffered : end] = data[:taken]
            self._num_buffered, data = end, data[taken:]
            if end == _BUFFER_BYTES:
                self._flush()

    def _flush(self) -> None:
        """Empty the buffer, which holds a multiple of the alignment."""
        self._write_out(memoryview(self._buffer)[: self._num_buffered])
        self._num_buffered = 0

    def _write_out(self, data: memoryview) -> None:
        while data:
            try:
                num_bytes = os.pwrite(self._fd, data[:_WRITE_BYTES], self._num_written)
            except OSError as exc:
                if exc.errno != errno.EINVAL or not self._make_indirect():
                    raise
                continue
            self._num_written += num_bytes
            data = data[num_bytes:]

    def _make_indirect(self) -> bool:
        """Write through the page cache from here on; false if that is so already."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return bool(flags & os.O_DIRECT)


def _address(data: bytes | memoryview) -> int:
    return np.frombuffer(data, dtype=np.uint8).ctypes.data
