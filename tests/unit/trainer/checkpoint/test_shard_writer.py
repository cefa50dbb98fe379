"""ShardWriter writes torch's own format: torch alone reads it here."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from trivet.storage.durable import hash_file, list_files
from trivet.trainer.checkpoint.shard_writer import ShardWriter


@pytest.fixture
def state() -> dict:
    generator = torch.Generator().manual_seed(1)
    large = torch.randn(300, 257, generator=generator)
    return {
        "large": large,
        "tied": large,
        "transposed": torch.randn(200, 300, generator=generator).t(),
        "slice": torch.randn(400, 100, generator=generator)[13:, :],
        "half": torch.randn(70_001, generator=generator).bfloat16(),
        "scalar": torch.tensor(7.0),
        "none": torch.zeros(0, 5),
        "bytes": torch.get_rng_state(),
        "groups": [{"lr": 0.5, "betas": (0.9, 0.99)}],
    }


def write(directory: Path, state: dict, world) -> ShardWriter:
    writer = ShardWriter(directory, nullcontext)
    save(state, storage_writer=writer, process_group=world.control)
    return writer


def test_torch_reads_every_kind_of_tensor_back(state: dict, world, tmp_path: Path) -> None:
    write(tmp_path, state, world)
    found: dict[str, object] = {
        name: torch.zeros_like(value) for name, value in state.items() if isinstance(value, torch.Tensor)
    }
    found["groups"] = [{"lr": 0.0, "betas": (0.0, 0.0)}]
    load(found, storage_reader=FileSystemReader(tmp_path), process_group=world.control)
    assert found["groups"] == state["groups"]
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[name], value, rtol=0, atol=0)


def test_a_tensor_with_two_names_is_written_once(state: dict, world, tmp_path: Path) -> None:
    write(tmp_path, {"large": state["large"], "tied": state["large"]}, world)
    assert (tmp_path / "__0_0.distcp").stat().st_size < 1.5 * state["large"].nbytes


def test_each_file_of_shards_is_recorded(state: dict, world, tmp_path: Path) -> None:
    writer = write(tmp_path, state, world)
    assert list_files(tmp_path) == [".metadata", "__0_0.distcp"]
    assert writer.records == {"__0_0.distcp": hash_file(tmp_path / "__0_0.distcp")}
