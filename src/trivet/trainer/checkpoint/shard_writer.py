"""Writes the shards of a checkpoint in torch's distributed checkpoint format, from the learner's own memory.

`torch.distributed.checkpoint` reads the result by itself: one file a rank, with one `torch.save` archive a tensor, and `.metadata`,
which says where each lies. The way there differs from torch's FileSystemWriter: the archive around a tensor is made once for each
shape, and the bytes inside go from the tensor to the disk.
"""

import io
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import (
    FileSystemWriter,
    _StorageInfo,  # type: ignore[reportPrivateUsage]  # what readers find in .metadata; there is no public name
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from trivet.checkpoints.stream import FileStream
from trivet.storage.durable import FileRecord

Hold = Callable[[torch.Tensor], AbstractContextManager[torch.Tensor]]
"""Gives the tensor to write in place of one of the state's; it does not change inside the block."""

_MAX_HELD_BYTES = 16 << 20
"""Bytes of tensors that are held and written together: a thread that returns from the disk takes time from the others."""


@dataclass(frozen=True)
class ShardResult(WriteResult):
    """The place of one item in its file, and the record of the whole file."""

    file: str
    record: FileRecord


class ShardWriter(FileSystemWriter):
    """The writer of one save on one rank. On the coordinator `records` describes every rank's file afterwards."""

    def __init__(self, directory: Path, hold: Hold) -> None:
        super().__init__(directory)
        self._directory = directory
        self._hold = hold
        self.records: dict[str, FileRecord] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items into one file."""
        name = f"{plan.storage_data.prefix}0.distcp"
        written: dict[tuple[int, torch.dtype, torch.Size], _StorageInfo] = {}
        places: list[_StorageInfo] = []
        with FileStream(self._directory / name) as stream, ExitStack() as held_until_written:
            for item in plan.items:
                data = planner.resolve_data(item)
                if isinstance(data, io.BytesIO):
                    places.append(_put(stream, name, data.getbuffer()))
                    continue
                # Tied weights are one tensor under two names.
                key = (data.data_ptr(), data.dtype, data.size())
                if data.numel() == 0 or key not in written:
                    held = held_until_written.enter_context(self._hold(data))
                    written[key] = _put_tensor(stream, name, held.detach())
                    if stream.num_unwritten_bytes > _MAX_HELD_BYTES:
                        stream.flush()
                    if not stream.num_unwritten_bytes:
                        held_until_written.close()
                places.append(written[key])
            stream.flush()
            held_until_written.close()  # before the disk is asked whether it has everything
            record = stream.finish()
        future: Future[list[WriteResult]] = Future()
        future.set_result(
            [
                ShardResult(item.index, place.length, place, file=name, record=record)
                for item, place in zip(plan.items, places, strict=True)
            ]
        )
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write `.metadata` and collect the records of all files; runs on the coordinator."""
        super().finish(metadata, results)
        for result in (result for rank in results for result in rank):
            assert isinstance(result, ShardResult)
            self.records[result.file] = result.record


def _put(stream: FileStream, name: str, data: memoryview, *, prefix: bytes = b"", suffix: bytes = b"") -> _StorageInfo:
    start = stream.write(data, prefix=prefix, suffix=suffix)
    return _StorageInfo(name, start, len(prefix) + data.nbytes + len(suffix))


def _put_tensor(stream: FileStream, name: str, tensor: torch.Tensor) -> _StorageInfo:
    prefix, suffix = _archive(tensor.dtype, tensor.size())
    data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return _put(stream, name, data, prefix=prefix, suffix=suffix)


@lru_cache(maxsize=1024)
def _archive(dtype: torch.dtype, shape: torch.Size) -> tuple[bytes, bytes]:
    """Return the bytes that `torch.save` writes before and after the data of a contiguous tensor."""
    archive = _Archive()
    with torch.serialization.skip_data():
        torch.save(torch.empty(shape, dtype=dtype), archive)
    content = archive.getvalue()
    return content[: archive.hole], content[archive.hole :]


class _Archive(io.BytesIO):
    """Receives an archive without its data: torch skips the length of the data instead of writing it."""

    hole: int | None = None
    """Offset at which the data belongs; None: there is no data."""

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        assert whence == io.SEEK_CUR
        assert self.hole is None, "one tensor has one storage"
        self.hole = self.tell()
        return self.hole
