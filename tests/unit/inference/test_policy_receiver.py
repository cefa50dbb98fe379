"""What a worker receives over real gloo is the published policy, or an error; and its memory is free afterwards."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file

from trivet.config.layout import RunLayout
from trivet.errors import WeightsError
from trivet.inference.policy_receiver import PolicyReceiver
from trivet.storage.durable import FileRecord
from trivet.trainer.weight_sender import WeightSender
from trivet.transfer.group import open_store
from trivet.weights.manifest import Manifest
from trivet.weights.publish import publish
from trivet.wire.versions import PolicyVersion, TransferRound

KEY = b"k" * 32
CPU = torch.device("cpu")


def write(directory: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    large = torch.randn(1000, 3, generator=generator).bfloat16()
    save_file({"b": torch.tensor(4.5), "a": large, "empty": torch.zeros(0, 2)}, directory / "model-2.safetensors")
    save_file({"d": torch.arange(5), "e": large.T.contiguous()}, directory / "model-1.safetensors")
    (directory / "config.json").write_text("{}")


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return RunLayout(tmp_path)


@pytest.fixture
def manifest(layout: RunLayout) -> Manifest:
    return publish(layout, version=PolicyVersion(3), run_id="test", write=write)


@pytest.fixture
def transfer(manifest: Manifest) -> Iterator[TransferRound]:
    store = open_store("127.0.0.1")
    yield TransferRound(
        version=manifest.version,
        digest=manifest.digest,
        group_id="g",
        host="127.0.0.1",
        port=store.port,
        world_size=2,
        timeout_s=20.0,
    )
    del store


def await_end(receiver: PolicyReceiver) -> None:
    while not receiver.is_done():
        time.sleep(0.01)


def num_maps() -> int:
    """Return how many parts of this process's memory are files that were received."""
    return Path("/proc/self/maps").read_text().count("memfd:model")


def test_a_policy_arrives_as_it_was_published_again_and_again(
    layout: RunLayout, manifest: Manifest, transfer: TransferRound
) -> None:
    sender, receiver = WeightSender(layout, device=CPU, key=KEY), PolicyReceiver(device=CPU, key=KEY)
    directory = layout.weights_step(3)
    published = {name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    for group_id in ("g", "h"):
        announced = structs.replace(transfer, group_id=group_id)
        receiver.begin(announced, manifest.weight_files, rank=1)
        sender.begin(announced)
        await_end(receiver)
        received = dict(receiver.take())
        assert received.keys() == published.keys()
        for name, tensor in published.items():
            assert received[name].dtype == tensor.dtype
            assert torch.equal(received[name], tensor)
        assert num_maps()
        received.clear()
        assert not num_maps(), "the memory is free once the tensors are"


def test_a_policy_whose_digest_differs_is_an_error(layout: RunLayout, manifest: Manifest, transfer: TransferRound) -> None:
    sender, receiver = WeightSender(layout, device=CPU, key=KEY), PolicyReceiver(device=CPU, key=KEY)
    name, record = list(manifest.weight_files.items())[-1]
    records = manifest.weight_files | {name: FileRecord(record.num_bytes, "0" * 32)}
    receiver.begin(transfer, records, rank=1)
    sender.begin(transfer)
    with pytest.raises(WeightsError, match=f"{name} of policy 3 did not arrive as it was published"):
        await_end(receiver)


def retire(layout: RunLayout) -> None:
    layout.weights_step(3).rename(layout.root / "elsewhere")


def replace(layout: RunLayout) -> None:
    def write_another(directory: Path) -> None:
        write(directory)
        save_file({"d": torch.zeros(70)}, directory / "model-1.safetensors")

    publish(layout, version=PolicyVersion(3), run_id="test", write=write_another)


@pytest.mark.parametrize("change", [retire, replace])
def test_a_policy_that_the_trainer_does_not_have_is_an_error_at_once(
    layout: RunLayout, manifest: Manifest, transfer: TransferRound, change: Callable[[RunLayout], None]
) -> None:
    change(layout)
    sender, receiver = WeightSender(layout, device=CPU, key=KEY), PolicyReceiver(device=CPU, key=KEY)
    receiver.begin(transfer, manifest.weight_files, rank=1)
    sender.begin(transfer)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"[Cc]onnection closed|reset"):
        await_end(receiver)
    assert time.monotonic() - began < transfer.timeout_s
    assert [each.name for each in threading.enumerate()].count("weight-sender"), "the trainer's thread goes on"
