"""The ranks of the trainer: how they find each other and how they agree. Nothing else reads the environment of ranks.

What they exchange is tensors and bytes of msgpack: objects would be pickled, and unpickling runs what a stranger may have sent.

Legend: rank 0 is the main rank: it alone talks to the orchestrator and writes files, except sharded checkpoints.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from trivet.errors import ConfigError
from trivet.trainer.rank_starter import RENDEZVOUS_FILE
from trivet.wire.codec import decode, encode


class _Values(msgspec.Struct, frozen=True):
    by_name: dict[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    """One dimension, over which the model is sharded; or two, copies and shards."""
    control: dist.ProcessGroup
    """Gloo, on host memory; waits longer than a collective may, because rank 0 waits for batches."""

    @property
    def num_replicas(self) -> int:
        """Copies of the sharded model."""
        return self.mesh.size(0) if self.mesh.ndim > 1 else 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0


@contextmanager
def open_world(*, device: str, timeout_s: float, wait_timeout_s: float = 0.0, num_replicas: int = 1) -> Iterator[World]:
    """Join the other ranks, which `rank_starter` started on this machine or torchrun on several; alone when there is none.

    Args:
        device: `auto`, `cpu` or `cuda`.
        timeout_s: longest collective operation.
        wait_timeout_s: how much longer the other ranks may wait while rank 0 waits for a batch.
        num_replicas: copies of the model, each sharded over its part of the ranks.

    Raises:
        ConfigError: `cuda` without a CUDA device; or the copies do not divide the ranks.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    require_replicas(num_replicas, num_ranks=size)
    chosen = _choose_device(device, local_rank=int(os.environ.get("LOCAL_RANK", "0")))
    # On the CPU too, for what is kept there: parameters and optimizer state that are off-loaded.
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    timeout = timedelta(seconds=timeout_s)
    if "RANK" in os.environ and RENDEZVOUS_FILE not in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=_open_store(size), rank=rank, world_size=size)
    try:
        control = dist.new_group(backend="gloo", timeout=timeout + timedelta(seconds=wait_timeout_s))
        assert isinstance(control, dist.ProcessGroup)
        if num_replicas == 1:
            mesh = init_device_mesh(chosen.type, (size,), mesh_dim_names=("shard",))
        else:
            mesh = init_device_mesh(chosen.type, (num_replicas, size // num_replicas), mesh_dim_names=("replicate", "shard"))
        yield World(rank=rank, size=size, device=chosen, mesh=mesh, control=control)
    finally:
        dist.destroy_process_group()


def _open_store(num_ranks: int) -> "dist.HashStore | dist.FileStore":  # type: ignore[reportPrivateImportUsage]  # as below
    """Return the store in which the ranks of this machine find each other's addresses. Nothing listens for it."""
    if num_ranks == 1:
        return dist.HashStore()  # type: ignore[reportPrivateImportUsage]  # public, only not declared
    return dist.FileStore(os.environ[RENDEZVOUS_FILE], num_ranks)  # type: ignore[reportPrivateImportUsage]  # as above


def require_replicas(num_replicas: int, *, num_ranks: int) -> None:
    """
    Raises:
        ConfigError: they do not divide the ranks.
    """
    if num_ranks % num_replicas:
        divisors = ", ".join(str(number) for number in range(1, num_ranks + 1) if num_ranks % number == 0)
        raise ConfigError(
            f"model.dp_replicate ({num_replicas}) must divide the trainer's ranks ({num_ranks}): {num_ranks} % {num_replicas} = "
            f"{num_ranks % num_replicas}; set it to one of {divisors}"
        )


def broadcast_bytes(world: World, data: bytes | None) -> bytes:
    """What rank 0 passes as `data`, on every rank."""
    if world.size == 1:
        assert data is not None
        return data
    num_bytes = torch.tensor([len(data) if data is not None else 0])
    dist.broadcast(num_bytes, src=0, group=world.control)
    buffer = bytearray(data) if data is not None else bytearray(int(num_bytes))
    if buffer:
        dist.broadcast(torch.frombuffer(buffer, dtype=torch.uint8), src=0, group=world.control)
    return bytes(buffer)


def gather_bytes(world: World, data: bytes) -> list[bytes]:
    """Return on every rank what each rank passes as `data`, by rank."""
    if world.size == 1:
        return [data]
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world.size)]
    dist.all_gather(sizes, torch.tensor([len(data)]), group=world.control)
    longest = max(int(size) for size in sizes)
    padded = torch.frombuffer(bytearray(data.ljust(longest + 1, b"\0")), dtype=torch.uint8)
    parts = [torch.empty_like(padded) for _ in range(world.size)]
    dist.all_gather(parts, padded, group=world.control)
    return [part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor that ranks share out, on each of them; others as they are. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sum_over_ranks(world: World, values: torch.Tensor) -> torch.Tensor:
    if world.size > 1:
        dist.all_reduce(values)
    return values


def gather_values(world: World, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Each metric's values of all ranks, one behind the other."""
    if world.size == 1:
        return values
    parts = gather_bytes(world, encode(_Values(values)))
    return join_values([decode(part, _Values).by_name for part in parts])


def join_values(parts: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    names = {name: None for part in parts for name in part}
    return {name: np.concatenate([part[name] for part in parts if name in part]) for name in names}


def barrier(world: World) -> None:
    """Returns once every rank is here."""
    if world.size > 1:
        dist.barrier(group=world.control)


def _choose_device(device: str, *, local_rank: int) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ConfigError('device = "cuda", but torch sees no CUDA device; install the CUDA build, or set device = "cpu"')
    return torch.device("cuda", local_rank) if has_cuda and device != "cpu" else torch.device("cpu")
