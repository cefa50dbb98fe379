"""Connects the trainer with the workers of inference servers, and broadcasts a policy from the trainer to all of them.

Both ends use this module: `trainer.weight_sender` and `inference.weight_transfer`. vLLM's own NCCL engine is not used, because its
ranks unpickle what an unauthenticated store holds, and wait without a deadline for a rank that is lost. NCCL has not run here yet.

produces: on every other rank the tensors that rank 0, the trainer, sends
waits for: every rank of the group, in `__init__` and in each broadcast, at most the round's `timeout_s`
unblocked by: the other ranks; when a rank's process ends, the system closes its connections
"""

import hmac
import math
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore  # torch.distributed declares none

from trivet.errors import WeightsError
from trivet.faults import reach
from trivet.process.sockets import listen
from trivet.wire.codec import decode, encode
from trivet.wire.transfers import TensorInfo, TransferHeader, TransferRound

KEY_PURPOSE = "weights/transfer"
"""Purpose for which the key that the ranks must have is derived from the run's secret."""
_BUCKET_BYTES = 64 << 20
"""Tensors are sent in buckets of this size: a broadcast of one small tensor takes as long as one of a MiB."""
_ALIGNMENT = 16
"""Every tensor of a bucket begins at a multiple of this many bytes, which suits each dtype."""
_NONCE_BYTES = 32
_POLL_INTERVAL_S = 0.001


def open_store(host: str) -> tuple[TCPStore, int]:
    """Open a store in which the ranks of groups find each other's addresses; return it and its port. It closes when deleted."""
    listener = listen(host, 0)
    port = int(listener.getsockname()[1])
    store = TCPStore(host, port, None, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, port


class TransferGroup:
    """The connections of one group. After an error it is unusable: close it.

    >>> group = TransferGroup(transfer, rank=1, device=torch.device("cpu"), key=key)
    >>> header = group.receive_header(version)
    >>> for pairs in group.receive(header): ...
    """

    def __init__(self, transfer: TransferRound, *, rank: int, device: torch.device, key: bytes) -> None:
        """Connect to all other ranks, and verify that each has `key`.

        Args:
            device: a GPU for NCCL, the CPU for gloo. All ranks need the same kind.
        """
        self.id = transfer.group_id
        self._device, self._size = device, transfer.world_size
        self._timeout = timedelta(seconds=transfer.timeout_s)
        self._store = TCPStore(transfer.host, transfer.port, is_master=False, wait_for_workers=False, timeout=self._timeout)
        store = PrefixStore(transfer.group_id, self._store)
        self._group = self._open_nccl(store, rank) if device.type == "cuda" else self._open_gloo(store, rank)
        nonces = b"".join(self._gather(secrets.token_bytes(_NONCE_BYTES)))
        proofs = self._gather(hmac.digest(key, b"%d " % rank + nonces, "sha256"))
        for other, proof in enumerate(proofs):
            if not hmac.compare_digest(proof, hmac.digest(key, b"%d " % other + nonces, "sha256")):
                raise WeightsError(f"what connected as rank {other} of a weight transfer does not have the run's secret")

    def _open_gloo(self, store: PrefixStore, rank: int) -> Any:
        options = cast("Any", ProcessGroupGloo)._Options()  # which the public class does not declare
        options._timeout = self._timeout
        with socket.socket(type=socket.SOCK_DGRAM) as route:  # nothing is sent: the system chooses the address of this machine
            route.connect((self._store.host, self._store.port))
            options._devices = [ProcessGroupGloo.create_device(hostname=route.getsockname()[0])]
        return ProcessGroupGloo(store, rank, self._size, options)

    def _open_nccl(self, store: PrefixStore, rank: int) -> Any:
        from torch._C._distributed_c10d import ProcessGroupNCCL

        torch.cuda.set_device(self._device)  # of this thread
        # Torch reads the variable here, and has made the groups of training. By default it ends the process if a rank is lost.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"
        return ProcessGroupNCCL(store, rank, self._size, ProcessGroupNCCL.Options())

    def send_header(self, header: TransferHeader) -> None:
        """Send `header` from rank 0."""
        data = torch.frombuffer(bytearray(encode(header)), dtype=torch.uint8)
        self._broadcast(torch.tensor([len(data)]))
        self._broadcast(data)

    def receive_header(self, version: int) -> TransferHeader:
        """Return the header that rank 0 sends.

        Raises:
            WeightsError: the trainer refuses, or sends another policy than `version`.
        """
        size = self._broadcast(torch.zeros(1, dtype=torch.int64))
        data = self._broadcast(torch.empty(int(size), dtype=torch.uint8))
        header = decode(data.cpu().numpy().tobytes(), TransferHeader)
        if header.refusal or header.version != version:
            raise WeightsError(header.refusal or f"the trainer sends policy {header.version}, not {version}")
        return header

    def send(self, header: TransferHeader, tensors: Mapping[str, torch.Tensor]) -> None:
        """Send the tensors of `header` from rank 0."""
        for places, num_bytes in _make_buckets(header.tensors):
            bucket = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            for info, start, end in places:
                bucket[start:end] = tensors[info.name].reshape(-1).view(torch.uint8)
            reach("transfer.send", step=header.version)
            self._broadcast(bucket)

    def receive(self, header: TransferHeader) -> Iterator[list[tuple[TensorInfo, torch.Tensor]]]:
        """Yield the tensors of `header` in the order in which they come, on the group's device. Their memory is not used again."""
        for places, num_bytes in _make_buckets(header.tensors):
            bucket = self._broadcast(torch.empty(num_bytes, dtype=torch.uint8, device=self._device))
            yield [(info, bucket[start:end].view(getattr(torch, info.dtype)).view(info.shape)) for info, start, end in places]

    def close(self) -> None:
        """Close the connections. May be called again."""
        self._group.abort()

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send `tensor` from rank 0, or receive it in the memory of `tensor`; return it on the group's device."""
        tensor = tensor.to(self._device)
        self._await(self._group.broadcast(tensor, 0))
        return tensor

    def _gather(self, data: bytes) -> list[bytes]:
        """Return the data of every rank, by rank. All ranks pass the same number of bytes."""
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
        parts = [torch.empty_like(own) for _ in range(self._size)]
        self._await(self._group.allgather(parts, own))
        return [part.cpu().numpy().tobytes() for part in parts]

    def _await(self, work: Any) -> None:
        if self._device.type == "cpu":
            work.wait(self._timeout)
            return
        # NCCL's own `wait` only queues the wait on the GPU, and returns.
        deadline = time.monotonic() + self._timeout.total_seconds()
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise WeightsError(f"a rank of the transfer did not answer within {self._timeout.total_seconds():g} s")
            time.sleep(_POLL_INTERVAL_S)
        work.wait()


def _make_buckets(tensors: Sequence[TensorInfo]) -> Iterator[tuple[list[tuple[TensorInfo, int, int]], int]]:
    """Divide tensors into buckets, the same on every rank. Yield each tensor's first byte and the byte after it, and the size."""
    places: list[tuple[TensorInfo, int, int]] = []
    size = 0
    for info in tensors:
        num_bytes = math.prod(info.shape) * getattr(torch, info.dtype).itemsize
        if places and size + num_bytes > _BUCKET_BYTES:
            yield places, size
            places, size = [], 0
        places.append((info, size, size + num_bytes))
        size += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    if places:
        yield places, size
