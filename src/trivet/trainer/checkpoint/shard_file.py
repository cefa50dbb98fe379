"""Holds this rank's shards of a checkpoint in memory, as the bytes of their file, until a thread has written them.

Owned by `trainer.session`. The format is torch's distributed checkpoint: one file for each rank, with a `torch.save` archive for
each tensor, and `.metadata` with the offset of each archive. Torch's own async_save is not used: its copy and its buffered write
take six seconds of a processor for 1.6 GB, a fifth of a step of SmolLM2-135M on two cores. This module copies the state into the
bytes of the file and writes these past the page cache, which takes two seconds.
"""

import errno
import fcntl
import io
import os
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemWriter,
    _StorageInfo,  # type: ignore[reportPrivateUsage]  # what readers find in .metadata; there is no public name
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from trivet.errors import CheckpointError
from trivet.storage.durable import FileRecord
from trivet.trainer.ranks.world import World, gather_bytes

_PAGE_BYTES = 4096
"""Alignment that direct writes need of memory, offset and length. No disk needs more."""
_ALIGNMENT = 64
"""Alignment of a tensor in the file, so that its bytes can be copied as numbers of any dtype."""
_WRITE_BYTES = 32 << 20
"""Bytes of one write. While a direct write runs, the kernel pins its pages in memory: 32 MiB bounds them. It is a judgement, not a
measurement; a disk reaches its full rate with much smaller writes."""


class _Outcome(msgspec.Struct, frozen=True):
    """The result of one rank's write, which all ranks exchange."""

    name: str
    record: FileRecord | None
    """None if the write failed."""
    error: str = ""


class ShardFile:
    """Copies the shards of one rank and writes their file. The memory is kept for the next checkpoint, page-locked for a GPU."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._num_bytes = 0
        self._path = Path()
        self._finish: Callable[[], None] = lambda: None

    def copy(self, directory: Path, state: dict[str, Any]) -> None:
        """Copy this rank's shards of `state`, to be written into `directory`. The state may change afterwards. Collective."""
        world = self._world
        # The ranks' shards are the same at every step. Without the cache the ranks would agree on them again, which takes as long
        # as computing the digests.
        planner = DefaultSavePlanner(enable_plan_caching=True)
        try:
            with torch.no_grad():  # autograd would record an operation for each shard of a DTensor
                # Without `no_dist` a single rank would pickle its plan to send it to itself.
                save(
                    state,
                    storage_writer=_Copier(directory, self),
                    planner=planner,
                    process_group=world.control,
                    no_dist=world.size == 1,
                )
        except CheckpointException as exc:
            causes = "; ".join(f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in exc.failures.items())
            raise CheckpointError(f"{directory} could not be written: {causes}") from exc

    def write(self, group: dist.ProcessGroup) -> dict[str, FileRecord]:
        """Write the file, and `.metadata` on rank 0. Return the record of each rank's file, by name. Collective over `group`."""
        try:
            outcome = _Outcome(self._path.name, write_direct(self._path, self._memory[: self._num_bytes]))
            self._finish()
        except Exception as exc:  # noqa: BLE001  the other ranks wait, and must get an error of any type
            outcome = _Outcome(self._path.name, None, f"{type(exc).__name__}: {exc}")
        parts = gather_bytes(self._world, msgspec.msgpack.encode(outcome), group=group)
        outcomes = [msgspec.msgpack.decode(part, type=_Outcome) for part in parts]
        if errors := [f"rank {rank}: {found.error}" for rank, found in enumerate(outcomes) if found.error]:
            raise CheckpointError(f"{self._path.parent} could not be written: {'; '.join(errors)}")
        return {found.name: found.record for found in outcomes if found.record is not None}

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return page-aligned memory for a file of `num_bytes`, filled up to whole pages."""
        num_padded = num_bytes + -num_bytes % _PAGE_BYTES
        if len(self._memory) != num_padded:
            pins = self._world.device.type == "cuda" and torch.cuda.is_available()
            memory = torch.empty(num_padded + _PAGE_BYTES, dtype=torch.uint8, pin_memory=pins)
            start = -memory.data_ptr() % _PAGE_BYTES
            self._memory = memory[start : start + num_padded].zero_()
        self._num_bytes = num_bytes
        return self._memory


class _Copier(FileSystemWriter):
    """A writer of torch's that fills a `ShardFile`. On the coordinator `.metadata` waits for the file, too."""

    def __init__(self, directory: Path, file: ShardFile) -> None:
        super().__init__(directory)
        self._directory = directory
        self._file = file

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy this rank's items into the memory of the file, one after the other."""
        name = f"{plan.storage_data.prefix}0.distcp"
        end = 0
        contents: list[tuple[int, bytes | torch.Tensor]] = []
        results: list[WriteResult] = []
        for item in plan.items:
            data = planner.resolve_data(item)
            if isinstance(data, io.BytesIO):
                pieces: tuple[bytes | torch.Tensor, ...] = (data.getvalue(),)
                start = end
            else:
                prefix, suffix = _archive(data.dtype, data.size())
                pieces = (prefix, data.detach(), suffix)
                start = end + -(end + len(prefix)) % _ALIGNMENT
            end = start
            for piece in pieces:
                contents.append((end, piece))
                end += len(piece) if isinstance(piece, bytes) else piece.nbytes
            results.append(WriteResult(item.index, end - start, _StorageInfo(name, start, end - start)))
        memory = self._file.allocate(end)
        view = memory.numpy().data
        for offset, piece in contents:
            if isinstance(piece, bytes):
                view[offset : offset + len(piece)] = piece
            elif piece.numel():
                target = memory[offset : offset + piece.nbytes].view(piece.dtype).view(piece.size())
                target.copy_(piece, non_blocking=True)
        if memory.is_pinned():
            torch.cuda.current_stream().synchronize()
        self._file._path = self._directory / name
        self._file._finish = lambda: None
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Keep the arguments until `ShardFile.write` writes `.metadata`. Torch calls it on rank 0 alone."""
        self._file._finish = partial(super().finish, metadata, results)


@lru_cache(maxsize=1024)
def _archive(dtype: torch.dtype, shape: torch.Size) -> tuple[bytes, bytes]:
    """Return the bytes that `torch.save` writes before and after the data of a contiguous tensor."""
    archive = _Archive()
    with torch.serialization.skip_data():
        torch.save(torch.empty(shape, dtype=dtype), archive)
    content = archive.getvalue()
    hole = len(content) if archive.hole is None else archive.hole
    return content[:hole], content[hole:]


class _Archive(io.BytesIO):
    """Receives an archive without its data: torch skips the length of the data instead of writing it."""

    hole: int | None = None
    """Offset at which the data belongs; None: there is no data."""

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        assert whence == io.SEEK_CUR
        assert self.hole is None, "one tensor has one storage"
        self.hole = self.tell()
        return self.hole


def write_direct(path: Path, content: torch.Tensor) -> FileRecord:
    """Write and sync a new file past the page cache, where the file system allows it; return its size and digest.

    A buffered write would copy every byte into the page cache, which takes more processor time than the rest of a checkpoint.
    `content`, uint8, begins at a page of memory, and its last page is its own to the end.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        fd = os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        # The file system has no direct writes. Some create the empty file before they raise the error.
        path.unlink(missing_ok=True)
        fd = os.open(path, flags, 0o644)
    digest, written = xxhash.xxh3_128(), 0
    num_bytes = len(content)
    pages = content.as_strided((num_bytes + -num_bytes % _PAGE_BYTES,), (1,)).numpy().data
    try:
        for start in range(0, num_bytes, _WRITE_BYTES):
            digest.update(pages[start : min(start + _WRITE_BYTES, num_bytes)])
            end = min(start + _WRITE_BYTES, len(pages))
            while written < end:
                try:
                    written += os.pwrite(fd, pages[written:end], written)
                except OSError as exc:
                    status = fcntl.fcntl(fd, fcntl.F_GETFL)
                    if exc.errno != errno.EINVAL or not status & os.O_DIRECT:
                        raise
                    fcntl.fcntl(fd, fcntl.F_SETFL, status & ~os.O_DIRECT)
        os.ftruncate(fd, num_bytes)
        os.fsync(fd)
    finally:
        os.close(fd)
    return FileRecord(num_bytes=num_bytes, xxh3_128=digest.hexdigest())
