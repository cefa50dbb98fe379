"""Reads the trainer part of a checkpoint without running code in it. Called by `trainer.checkpoint.state`.

`torch.distributed.checkpoint` unpickles `.metadata`, and loads everything but tensors with `weights_only=False`: whoever wrote such
a file could run code. Here `.metadata` may name the classes of its own format and nothing else, and everything in the shards is
loaded with `weights_only=True`.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from trivet.errors import CheckpointError

METADATA_FILE = ".metadata"
_ADMITTED = frozenset(
    {
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "Metadata",
                "TensorStorageMetadata",
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "TensorProperties",
                "_MEM_FORMAT_ENCODING",
                "MetadataIndex",
                "StorageMeta",
            )
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),  # its name in Python 3.13
    }
)
"""The classes that torch 2.11 to 2.13 write into `.metadata`, besides dtypes."""


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        is_dtype = module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype)
        if not is_dtype and (module_name, global_name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, which no checkpoint needs")
        return super().find_class(module_name, global_name)


class ShardReader(FileSystemReader):
    """A `FileSystemReader` that runs nothing it reads."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._directory = directory

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the checkpoint's metadata."""
        path = self._directory / METADATA_FILE
        metadata = read_metadata(path)
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class ShardPlanner(DefaultLoadPlanner):
    """A `DefaultLoadPlanner` that accepts plain values, but no objects, where an entry is not a tensor."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load an entry that is not a tensor; refuse it if it holds anything but plain values."""
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def read_metadata(path: Path) -> Metadata:
    """Read a `.metadata` file without running code in it."""
    try:
        with path.open("rb") as file:
            metadata = _RestrictedUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
        names = {str(place.relative_path) for place in (metadata.storage_data or {}).values()}
    except OSError as exc:
        raise CheckpointError(f"{path} cannot be read: {exc.strerror}; the checkpoint is damaged, resume from another") from exc
    except Exception as exc:
        raise CheckpointError(
            f"{path} is not the metadata of a checkpoint: {exc}; nothing of it was executed. Resume from another checkpoint"
        ) from exc
    if foreign := sorted(name for name in names if Path(name).name != name):
        raise CheckpointError(f"{path} names {foreign[0]!r}, which lies outside its directory; resume from another checkpoint")
    return metadata
