"""Test a world of one rank, and metrics of several. Real ranks are in tests/integration/test_trainer_ranks.py."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from trivet.errors import ConfigError
from trivet.trainer.ranks import world as world_module
from trivet.trainer.ranks.world import World, barrier, broadcast_bytes, gather_values, open_world, sum_over_ranks
from trivet.wire.codec import encode


def test_a_rank_alone_needs_no_others_and_agrees_with_itself(world: World) -> None:
    assert (world.rank, world.size, world.is_main) == (0, 1, True)
    assert broadcast_bytes(world, b"batch") == b"batch"
    assert sum_over_ranks(world, torch.tensor(2.0)).item() == 2.0
    values = {"loss": np.array([1.0])}
    assert gather_values(world, values) is values
    barrier(world)


def test_a_world_can_be_opened_again_after_it_was_closed() -> None:
    for _ in range(2):
        with open_world(device="cpu", timeout_s=30):
            assert torch.distributed.is_initialized()
        assert not torch.distributed.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_is_refused_where_there_is_none() -> None:
    with pytest.raises(ConfigError, match='set device = "cpu"'), open_world(device="cuda", timeout_s=30):
        pass


def test_copies_of_the_model_divide_the_ranks() -> None:
    said = r"dp_replicate \(2\) must divide the trainer's ranks \(1\): 1 % 2 = 1; set it to one of 1"
    with pytest.raises(ConfigError, match=said), open_world(device="cpu", timeout_s=30, num_replicas=2):
        pass
    said = (
        r"dp_replicate \(2\) x model.cp \(2\) must divide the trainer's ranks \(1\): 1 % 4 = 1; set their product to one of 1"
    )
    with pytest.raises(ConfigError, match=said), open_world(device="cpu", timeout_s=30, num_replicas=2, context_size=2):
        pass


def test_torchs_allocator_is_told_the_share_of_the_gpu_before_a_rank_joins_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Joined(Exception):
        pass

    def join(*_: object, **__: object) -> None:
        raise Joined

    told: list[tuple[float, torch.device]] = []
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(world_module, "_choose_device", lambda device, *, local_rank: gpu)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: told.append((share, device)))
    monkeypatch.setattr(torch.distributed, "init_process_group", join)
    with pytest.raises(Joined), open_world(device="cuda", timeout_s=30, gpu_memory_share=0.42):
        pass
    assert told == [(0.42, gpu)]


def test_a_driver_that_is_too_old_is_named_instead_of_computing_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).\nPlease update your GPU driver")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fail)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    expected = (
        r"no CUDA device: The NVIDIA driver .* is too old \(found version 12020\)\.; this build needs a driver for CUDA 13\.0"
    )
    with pytest.raises(ConfigError, match=expected), open_world(device="cuda", timeout_s=30):
        pass


def test_values_of_ranks_that_measured_nothing_are_left_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = {"loss": np.array([1.0, 2.0])}, {"loss": np.array([3.0]), "entropy": np.array([0.5])}
    others = [encode(world_module._Values(values)) for values in ({}, other)]
    monkeypatch.setattr(world_module, "gather_bytes", lambda world, data: [data, *others])
    joined = gather_values(replace(world, size=3), own)
    assert {name: values.tolist() for name, values in joined.items()} == {"loss": [1.0, 2.0, 3.0], "entropy": [0.5]}
