"""Connects the ranks of the trainer: how they find each other and how they agree. Nothing else reads the environment of ranks.

This module exchanges tensors and bytes of msgpack. DCP, which writes checkpoints, pickles its plans, and unpickling runs whatever a
stranger sent; gloo lets whoever connects first take a rank's place. So ranks of several nodes prove to each other, in every group
before it is used, that all of them have the run's secret. Ranks of one machine do not: their addresses are in a file that only this
user can read.

Legend: rank 0 is the main rank: it alone talks to the orchestrator and writes files, except sharded checkpoints.
"""

import hmac
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, TCPStore  # torch.distributed declares none
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from trivet.config.check_roles import replicas_problem
from trivet.config.layout import SECRET_FILE
from trivet.errors import ConfigError, UnknownRank
from trivet.process.sockets import listen, read_place
from trivet.secret import RunSecret, read_secret
from trivet.trainer.ranks.starter import RENDEZVOUS_FILE
from trivet.wire.codec import decode, encode

_NONCE_BYTES = 32
"""Bytes of a nonce: long enough that none is ever drawn twice."""


class _Values(msgspec.Struct, frozen=True):
    by_name: dict[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The ranks as one of them sees them."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    """One dimension, over which the model is sharded; or two, copies and shards."""
    control: dist.ProcessGroup
    """Gloo, on host memory; waits longer than a collective may, because rank 0 waits for batches."""
    secret: RunSecret | None
    """The secret that ranks of several nodes prove to each other; None for ranks of one machine."""

    @property
    def num_replicas(self) -> int:
        """Copies of the sharded model."""
        return self.mesh.size(0) if self.mesh.ndim > 1 else 1

    @property
    def is_main(self) -> bool:
        """True on rank 0."""
        return self.rank == 0


@contextmanager
def open_world(
    *, device: str, timeout_s: float, wait_timeout_s: float = 0.0, num_replicas: int = 1, gpu_memory_share: float = 1.0
) -> Iterator[World]:
    """Join the other ranks. `ranks.starter` starts them on each node, or a user does with torchrun. A single rank joins nobody.

    Args:
        device: `auto`, `cpu` or `cuda`.
        timeout_s: longest collective operation.
        wait_timeout_s: how much longer the other ranks may wait while rank 0 waits for a batch.
        num_replicas: copies of the model, each sharded over its part of the ranks.
        gpu_memory_share: the share of the GPU's memory that torch's allocator may take.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if problem := replicas_problem(num_replicas, num_ranks=size, key="model.dp_replicate", ranks="the trainer's ranks"):
        raise ConfigError(problem)
    chosen = _choose_device(device, local_rank=int(os.environ.get("LOCAL_RANK", "0")))
    # On the CPU too, for off-loaded parameters and optimizer state.
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
        torch.cuda.set_per_process_memory_fraction(gpu_memory_share, chosen)
    timeout = timedelta(seconds=timeout_s)
    place = read_place() if "RANK" in os.environ else None
    if "RANK" in os.environ and RENDEZVOUS_FILE not in os.environ and place is None:
        dist.init_process_group(backend, timeout=timeout)
    else:
        if place is not None:
            # Ranks of several nodes find each other's addresses at rank 0, which listens at one address alone.
            listener = listen(place.host, place.port).detach() if rank == 0 else None
            store = PrefixStore(
                f"attempt_{place.attempt}",
                TCPStore(
                    place.host,
                    place.port,
                    place.num_ranks,
                    is_master=rank == 0,
                    timeout=timeout,
                    wait_for_workers=False,
                    master_listen_fd=listener,
                ),
            )
        else:  # ranks of one machine find each other's addresses without a port
            store = HashStore() if size == 1 else FileStore(os.environ[RENDEZVOUS_FILE], size)
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)
    has_peers_waiting = size > 1
    try:
        secret = read_secret(Path(os.environ[SECRET_FILE])) if place is not None and size > 1 else None
        prove_ranks(None, secret)
        control = _open_gloo_group(timeout + timedelta(seconds=wait_timeout_s), secret)
        if num_replicas == 1:
            mesh = init_device_mesh(chosen.type, (size,), mesh_dim_names=("shard",))
        else:
            mesh = init_device_mesh(chosen.type, (num_replicas, size // num_replicas), mesh_dim_names=("replicate", "shard"))
        for group in mesh.get_all_groups():
            prove_ranks(group, secret)
        yield World(rank=rank, size=size, device=chosen, mesh=mesh, control=control, secret=secret)
        has_peers_waiting = False
    finally:
        # After a failure NCCL's shutdown would wait for the other ranks, which wait for this one in a collective: the error would
        # be told minutes later. This process ends instead, which aborts its communicators, and the starter ends the others.
        if not has_peers_waiting:
            dist.destroy_process_group()


def open_group(world: World, *, timeout_s: float) -> dist.ProcessGroup:
    """Return a further group of all ranks, over gloo. Collective."""
    return _open_gloo_group(timedelta(seconds=timeout_s), world.secret)


def _open_gloo_group(timeout: timedelta, secret: RunSecret | None) -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    prove_ranks(group, secret)
    return group


def prove_ranks(group: dist.ProcessGroup | None, secret: RunSecret | None) -> None:
    """Have every rank of `group` show that it knows `secret`: HMAC-SHA256 over its rank and a nonce of each rank.

    The connections of a group do not change once it is made, so one proof is enough. Collective.

    Args:
        group: None for the group of all ranks.
        secret: None when there is nobody to prove it to (`World.secret`).
    """
    if secret is None:
        return
    key = secret.derive("trainer/ranks")
    nonces = b"".join(_gather_fixed(secrets.token_bytes(_NONCE_BYTES), group))
    proofs = _gather_fixed(_proof(key, dist.get_rank(group), nonces), group)
    for rank, proof in enumerate(proofs):
        if not hmac.compare_digest(proof, _proof(key, rank, nonces)):
            raise UnknownRank(
                f"what connected as rank {rank} of {len(proofs)} of the trainer does not have the run's secret: another "
                "program took its place. Start the run again; if that repeats itself, see who else uses the nodes' network"
            )


def _proof(key: bytes, rank: int, nonces: bytes) -> bytes:
    return hmac.digest(key, b"%d " % rank + nonces, "sha256")


def _gather_fixed(data: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Return what every rank passes, by rank. All ranks pass the same number of bytes, over host memory."""
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    return [part.numpy().tobytes() for part in parts]


def broadcast_bytes(world: World, data: bytes | None) -> bytes:
    """Return on every rank what rank 0 passes as `data`. Collective."""
    if world.size == 1:
        assert data is not None
        return data
    num_bytes = torch.tensor([len(data) if data is not None else 0])
    dist.broadcast(num_bytes, src=0, group=world.control)
    buffer = bytearray(data) if data is not None else bytearray(int(num_bytes))
    if buffer:
        dist.broadcast(torch.frombuffer(buffer, dtype=torch.uint8), src=0, group=world.control)
    return bytes(buffer)


def gather_bytes(world: World, data: bytes, *, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Return on every rank what each rank passes as `data`, by rank. Collective over `group`, by default `world.control`."""
    if world.size == 1:
        return [data]
    group = group or world.control
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world.size)]
    dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.frombuffer(bytearray(data.ljust(longest + 1, b"\0")), dtype=torch.uint8)
    parts = [torch.empty_like(padded) for _ in range(world.size)]
    dist.all_gather(parts, padded, group=group)
    return [part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]


def gather_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a sharded tensor on each rank; return other tensors as they are. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sum_over_ranks(world: World, values: torch.Tensor) -> torch.Tensor:
    """Add up `values` over all ranks, in place, and return them. Collective."""
    if world.size > 1:
        dist.all_reduce(values)
    return values


def gather_values(world: World, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return each metric's values of all ranks, one rank after the other. Collective."""
    if world.size == 1:
        return values
    parts = [decode(part, _Values).by_name for part in gather_bytes(world, encode(_Values(values)))]
    names = {name: None for part in parts for name in part}
    return {name: np.concatenate([part[name] for part in parts if name in part]) for name in names}


def barrier(world: World) -> None:
    """Return once every rank is here. Collective."""
    if world.size > 1:
        dist.barrier(group=world.control)


def _choose_device(device: str, *, local_rank: int) -> torch.device:
    if device != "cpu" and torch.cuda.is_available():
        return torch.device("cuda", local_rank)
    if device != "cuda":
        return torch.device("cpu")
    try:
        torch.cuda.init()
        reason = "it gives no reason"
    except (RuntimeError, AssertionError) as exc:  # its CPU build asserts that it is a CUDA build
        reason = (str(exc).strip().splitlines() or [type(exc).__name__])[0]
    if torch.version.cuda is None:
        remedy = "install the CUDA build"
    elif "driver" in reason:
        remedy = f"this build needs a driver for CUDA {torch.version.cuda}: update the driver"
    else:
        remedy = "see what nvidia-smi -L shows, and what CUDA_VISIBLE_DEVICES hides"
    raise ConfigError(f'device = "cuda", but torch sees no CUDA device: {reason}; {remedy}; or set device = "cpu"')
