"""Connects the ranks of the trainer and exchanges data between them. No other module reads the environment variables of ranks.

This module exchanges tensors and bytes of msgpack. Torch's distributed checkpoint exchanges pickled plans, and unpickling data of a
stranger would run the stranger's code. Gloo accepts whoever connects first as a rank. So ranks of several nodes prove to each
other, in every group before it is used, that all of them have the run's secret. Ranks of one machine do not: their addresses are in
a file that only this user can read.

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

from trivet.config.check_roles import ranks_problem
from trivet.config.layout import SECRET_FILE
from trivet.errors import ConfigError, UnknownRank
from trivet.process.sockets import listen, read_place
from trivet.secret import RunSecret, read_secret
from trivet.trainer.attention.context import ContextGroup
from trivet.trainer.ranks.starter import RENDEZVOUS_FILE
from trivet.wire.codec import decode, encode

_NONCE_BYTES = 32
"""Bytes of a nonce: long enough that none is ever drawn twice."""


class _Values(msgspec.Struct, frozen=True):
    """The message of `gather_values`: `wire.codec` encodes structs."""

    by_name: dict[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """All ranks, and this rank's place among them."""

    rank: int
    """This rank, counted from 0."""
    size: int
    """Number of ranks."""
    device: torch.device
    mesh: DeviceMesh
    """One dimension, over which the model is sharded; or two, over the model's copies and the shards of each."""
    control: dist.ProcessGroup
    """All ranks, over gloo and host memory. Its timeout is longer than that of tensors, because rank 0 waits for batches."""
    secret: RunSecret | None
    """The secret that ranks of several nodes prove to each other; None for ranks of one machine."""
    context: ContextGroup | None = None
    """The ranks that compute a row together with this one; None where each rank computes rows of its own."""

    @property
    def num_replicas(self) -> int:
        """Copies of the sharded model."""
        return self.mesh.size(0) if self.mesh.ndim > 1 else 1

    @property
    def num_row_groups(self) -> int:
        """Groups of ranks that compute rows of their own."""
        return self.size // (self.context.size if self.context else 1)

    @property
    def row_group(self) -> int:
        """The number of this rank's group among them."""
        return self.rank // (self.context.size if self.context else 1)

    @property
    def reports_rows(self) -> bool:
        """True on the rank of a group that reports what all its ranks have computed."""
        return self.context is None or self.context.index == 0

    @property
    def is_main(self) -> bool:
        """True on rank 0."""
        return self.rank == 0


@contextmanager
def open_world(
    *,
    device: str,
    timeout_s: float,
    wait_timeout_s: float = 0.0,
    num_replicas: int = 1,
    context_size: int = 1,
    gpu_memory_share: float = 1.0,
) -> Iterator[World]:
    """Join the other ranks. `ranks.starter` starts them on each node, or a user does with torchrun. A single rank joins nobody.

    Args:
        device: `auto`, `cpu` or `cuda`.
        timeout_s: seconds after which a collective operation fails.
        wait_timeout_s: further seconds that the other ranks wait, because rank 0 waits for a batch.
        num_replicas: copies of the model, each sharded over its part of the ranks.
        context_size: consecutive ranks that compute a row together.
        gpu_memory_share: the share of the GPU's memory that torch's allocator may take.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    parts = {"model.dp_replicate": num_replicas, "model.cp": context_size}
    if problem := ranks_problem(parts, num_ranks=size, ranks="the trainer's ranks"):
        raise ConfigError(problem)
    chosen_device = _choose_device(device, local_rank=int(os.environ.get("LOCAL_RANK", "0")))
    # A GPU's ranks exchange tensors in main memory too: off-loaded parameters and optimizer state.
    backend = "cpu:gloo,cuda:nccl" if chosen_device.type == "cuda" else "gloo"
    if chosen_device.type == "cuda":
        torch.cuda.set_device(chosen_device)
        torch.cuda.set_per_process_memory_fraction(gpu_memory_share, chosen_device)
    timeout = timedelta(seconds=timeout_s)
    place = read_place() if "RANK" in os.environ else None
    if "RANK" in os.environ and RENDEZVOUS_FILE not in os.environ and place is None:
        dist.init_process_group(backend, timeout=timeout)  # a user's torchrun set further variables, which torch reads
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
            mesh = init_device_mesh(chosen_device.type, (size,), mesh_dim_names=("shard",))
        else:
            shape = (num_replicas, size // num_replicas)
            mesh = init_device_mesh(chosen_device.type, shape, mesh_dim_names=("replicate", "shard"))
        for group in mesh.get_all_groups():
            prove_ranks(group, secret)
        context = _open_context(context_size, rank, size, timeout, secret) if context_size > 1 else None
        yield World(rank=rank, size=size, device=chosen_device, mesh=mesh, control=control, secret=secret, context=context)
        has_peers_waiting = False
    finally:
        # After a failure NCCL's shutdown would wait for the other ranks, which wait for this one in a collective, and the error
        # would appear minutes later. So this process ends without shutdown, and the starter ends the others.
        if not has_peers_waiting:
            dist.destroy_process_group()


def open_group(world: World, *, timeout_s: float) -> dist.ProcessGroup:
    """Open a further group of all ranks, over gloo and host memory. Collective."""
    return _open_gloo_group(timedelta(seconds=timeout_s), world.secret)


def _open_gloo_group(timeout: timedelta, secret: RunSecret | None) -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    prove_ranks(group, secret)
    return group


def _open_context(context_size: int, rank: int, size: int, timeout: timedelta, secret: RunSecret | None) -> ContextGroup:
    """Make the groups of `context_size` consecutive ranks, and return this rank's. Collective."""
    groups = [
        dist.new_group(list(range(first, first + context_size)), timeout=timeout) for first in range(0, size, context_size)
    ]
    group = groups[rank // context_size]
    assert isinstance(group, dist.ProcessGroup)
    prove_ranks(group, secret)
    return ContextGroup(group=group, size=context_size, index=rank % context_size)


def prove_ranks(group: dist.ProcessGroup | None, secret: RunSecret | None) -> None:
    """Verify that every rank of `group` has `secret`: each rank sends the HMAC-SHA256 of its number and of a nonce of every rank.

    The connections of a group do not change once it is made, so one proof is enough. Collective.

    Args:
        group: None for the group of all ranks.
        secret: None for ranks of one machine, which prove nothing (`World.secret`).
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
    """Return the data of every rank, by rank. All ranks pass the same number of bytes, over host memory."""
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    return [part.numpy().tobytes() for part in parts]


def broadcast_bytes(world: World, data: bytes | None) -> bytes:
    """Return on every rank the data of rank 0; other ranks pass None. Collective."""
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
    """Return on every rank the data of each rank, by rank. Collective over `group`, by default `world.control`."""
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
    """Concatenate each metric's values of all ranks, in the order of ranks. Collective."""
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
