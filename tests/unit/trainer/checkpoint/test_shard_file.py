"""A ShardFile has torch's own format: torch alone reads it here. It writes past the page cache, and through it where it must."""

import errno
import fcntl
import io
import os
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from support.shards import write_state
from trivet.errors import CheckpointError
from trivet.storage.durable import hash_file, list_files
from trivet.trainer.checkpoint import shard_file
from trivet.trainer.checkpoint.shard_file import ShardFile, write_direct


@pytest.fixture
def state() -> dict:
    generator = torch.Generator().manual_seed(1)
    return {
        "large": torch.randn(300, 257, generator=generator),
        "transposed": torch.randn(200, 300, generator=generator).t(),
        "slice": torch.randn(400, 100, generator=generator)[13:, :],
        "half": torch.randn(70_001, generator=generator).bfloat16(),
        "double": torch.randn(3, generator=generator, dtype=torch.float64),
        "scalar": torch.tensor(7.0),
        "none": torch.zeros(0, 5),
        "bytes": torch.get_rng_state(),
        "groups": [{"lr": 0.5, "betas": (0.9, 0.99)}],
    }


def read(directory: Path, state: dict, world) -> dict:
    found: dict = {name: torch.zeros_like(value) for name, value in state.items() if isinstance(value, torch.Tensor)}
    found["groups"] = [{"lr": 0.0, "betas": (0.0, 0.0)}]
    load(found, storage_reader=FileSystemReader(directory), process_group=world.control)
    return found


def test_torch_reads_every_kind_of_tensor_back_and_each_file_is_recorded(state: dict, world, tmp_path: Path) -> None:
    records = write_state(tmp_path, state, world)
    assert list_files(tmp_path) == [".metadata", "__0_0.distcp"]
    assert records == {"__0_0.distcp": hash_file(tmp_path / "__0_0.distcp")}
    found = read(tmp_path, state, world)
    assert found["groups"] == state["groups"]
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[name], value, rtol=0, atol=0)


def test_a_tensor_without_data_is_written_once() -> None:
    before, after = shard_file._archive(torch.float32, torch.Size([0, 5]))
    written = io.BytesIO()
    torch.save(torch.zeros(0, 5), written)
    assert before + after == written.getvalue()


def test_a_file_has_what_was_copied_and_its_memory_serves_the_next_one(state: dict, world, tmp_path: Path) -> None:
    file, expected, addresses = ShardFile(world), {}, set[int]()
    for number in (1, 2):
        directory = tmp_path / str(number)
        directory.mkdir()
        expected[number] = state["large"].clone()
        file.copy(directory, state)
        addresses.add(file._memory.data_ptr())
        state["large"].mul_(2.0)
        file.write(world.control)
    assert len(addresses) == 1
    for number, large in expected.items():
        assert torch.equal(read(tmp_path / str(number), state, world)["large"], large)


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 10_000])
@pytest.mark.parametrize("refuses", [None, "open", "write"])
def test_a_file_of_any_length_is_written_with_and_without_direct_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int, refuses: str | None
) -> None:
    """A file system may refuse direct writes when a file is opened, or when it is written; a write may be short."""
    original_open, original_write = os.open, os.pwrite

    def refuse_to_open(path, flags: int, *mode: int) -> int:
        if refuses == "open" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return original_open(path, flags, *mode)

    def refuse_to_write(fd: int, data: memoryview, offset: int) -> int:
        if refuses == "write" and offset and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return original_write(fd, data[:4096], offset)

    monkeypatch.setattr(shard_file.os, "open", refuse_to_open)
    monkeypatch.setattr(shard_file.os, "pwrite", refuse_to_write)
    memory = torch.arange(5 * 4096).to(torch.uint8)
    content = memory[-memory.data_ptr() % 4096 :][:num_bytes]
    record = write_direct(tmp_path / "file", content)
    assert (tmp_path / "file").read_bytes() == content.numpy().tobytes()
    assert record == hash_file(tmp_path / "file")


def test_what_cannot_be_written_is_named(state: dict, world, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises((CheckpointError, OSError), match="file"):
        write_state(blocked, state, world)
