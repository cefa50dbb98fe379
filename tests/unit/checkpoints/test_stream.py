"""Compare files and their digests with what was written, for sizes and memory alignments of every kind."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from trivet.checkpoints import stream
from trivet.checkpoints.stream import FileStream
from trivet.storage.durable import hash_file


def make_bytes(num_bytes: int, *, shift: int = 0) -> memoryview:
    """Return random bytes that start `shift` bytes after the start of a page."""
    room = np.random.default_rng(num_bytes).integers(0, 256, num_bytes + 8192, dtype=np.uint8)
    begin = -room.ctypes.data % 4096 + shift
    return room[begin : begin + num_bytes].data


def write(path: Path, parts: list[memoryview]) -> bytes:
    """Write the file and return its expected content."""
    expected = bytearray()
    with FileStream(path) as file:
        for part in parts:
            start = file.write(part, prefix=b"before", suffix=b"after")
            expected += bytes(start - len(expected)) + b"before" + bytes(part) + b"after"
            assert file.position == len(expected)
        record = file.finish()
    assert record == hash_file(path)
    return bytes(expected)


@pytest.mark.parametrize(
    "sizes",
    [[0], [1], [4096], [5, 70_000, 0, 3], [(1 << 20) - 1, 2, 1 << 20], [3_000_000, 64 << 10, (64 << 10) - 1, 5_000_001]],
    ids=str,
)
def test_the_file_holds_what_was_written_and_zeros_between(tmp_path: Path, sizes: list[int]) -> None:
    parts = [make_bytes(size, shift=64 * index) for index, size in enumerate(sizes)]
    expected = write(tmp_path / "file", parts)
    assert (tmp_path / "file").read_bytes() == expected


def test_large_parts_go_to_the_disk_from_where_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, copied = make_bytes(3_000_000, shift=192), list[int]()
    append = FileStream._append

    def count(self: FileStream, data: bytes) -> None:
        copied.append(len(data))
        append(self, data)

    monkeypatch.setattr(FileStream, "_append", count)
    write(tmp_path / "file", [make_bytes(100), data])
    assert sum(copied) < 100 + 4 * 4096


@pytest.mark.parametrize("moment", ["open", "write"])
def test_a_file_system_without_direct_writes_is_written_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    real_open, real_pwritev = os.open, os.pwritev

    def refuse_open(path, flags, mode=0o777):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct writes")
        return real_open(path, flags, mode)

    def refuse_write(fd, parts, offset):
        if stream.fcntl.fcntl(fd, stream.fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct writes")
        return real_pwritev(fd, parts, offset)

    if moment == "open":
        monkeypatch.setattr(os, "open", refuse_open)
    else:
        monkeypatch.setattr(os, "pwritev", refuse_write)
    expected = write(tmp_path / "file", [make_bytes(200_000), make_bytes(7)])
    assert (tmp_path / "file").read_bytes() == expected


def test_a_write_that_stops_in_the_middle_goes_on_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_pwritev = os.pwritev

    def write_a_third(fd, parts, offset):
        return real_pwritev(fd, [parts[0][: max(512, len(parts[0]) // 3)]], offset)

    monkeypatch.setattr(os, "pwritev", write_a_third)
    expected = write(tmp_path / "file", [make_bytes(200_000), make_bytes(100_001, shift=64)])
    assert (tmp_path / "file").read_bytes() == expected


def test_an_error_of_the_disk_is_raised_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd, parts, offset):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "file", [make_bytes(200_000)])


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        FileStream(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"old"
