"""Connects the trainer with the workers of inference servers, and broadcasts the files of a policy from the trainer to all of them.

Both ends use this module: `trainer.weight_sender` and `inference.policy_receiver`. What crosses are bytes from main memory to main
memory. Their number is that of the policy's manifest, which both ends have, and the receiver compares their digests with it.

vLLM's own NCCL engine is not used, because its ranks unpickle what an unauthenticated store holds, and wait without a deadline for
a rank that is lost. NCCL has not run here yet.

produces: on every other rank the bytes that rank 0, the trainer, sends
waits for: every rank of the group, to connect and in each broadcast, at most the round's `timeout_s`
unblocked by: the other ranks; when a rank's process ends, the system closes its connections
"""

import hmac
import os
import secrets
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, cast

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore  # torch.distributed declares none

from trivet.errors import WeightsError
from trivet.faults import reach
from trivet.process.sockets import address_towards, listen
from trivet.wire.versions import TransferRound

KEY_PURPOSE = "weights/transfer"
"""Purpose for which the key that the ranks must have is derived from the run's secret."""
_CHUNK_BYTES = 64 << 20
"""Bytes of one broadcast. Each has the round's timeout, and with NCCL this is what a transfer needs of the GPU's memory."""
_NONCE_BYTES = 32
_POLL_INTERVAL_S = 0.001


def open_store(host: str, port: int = 0) -> TCPStore:
    """Open a store in which the ranks of groups find each other's addresses. It closes when deleted.

    Args:
        port: 0: a free one.

    Raises:
        OSError: another program uses the port.
    """
    listener = listen(host, port)
    port = int(listener.getsockname()[1])
    return TCPStore(host, port, None, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


class TransferGroup:
    """One rank's connections. Each round makes new ones while the engines generate, so no round depends on the one before.

    >>> group = TransferGroup(device=torch.device("cpu"), key=key)
    >>> group.broadcast(transfer, memory_of_files, rank=1)
    """

    def __init__(self, *, device: torch.device, key: bytes) -> None:
        """Connect nothing yet.

        Args:
            device: a GPU for NCCL, the CPU for gloo. All ranks need the same kind.
            key: the key that every rank must have.
        """
        self._device, self._key = device, key
        self._group: Any = None
        """The connections of the newest round. They stay after it, because other ranks may still read from them."""
        self._timeout = timedelta()

    def broadcast(self, transfer: TransferRound, files: Iterable[torch.Tensor], *, rank: int = 0) -> None:
        """Connect, then send the bytes of `files` from rank 0, or receive them there. An error closes the connections.

        Args:
            files: the memory of each file, as bytes in main memory. Their number and sizes are the same on every rank.

        Raises:
            WeightsError: a rank does not have the key.
            Exception: a rank is missing, silent or lost. Torch has no narrower type.
        """
        try:
            self.close()
            self._connect(transfer, rank)
            for file in files:
                for chunk in file.split(_CHUNK_BYTES):
                    reach("transfer.send", step=transfer.version)
                    on_device = chunk.to(self._device)
                    self._await(self._group.broadcast(on_device, 0))
                    if rank and on_device is not chunk:
                        chunk.copy_(on_device)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connections. May be called again."""
        if self._group is not None:
            group, self._group = self._group, None
            group.abort()

    def _connect(self, transfer: TransferRound, rank: int) -> None:
        """Connect to all other ranks, and verify that each has the key."""
        self._timeout = timedelta(seconds=transfer.timeout_s)
        server = TCPStore(transfer.host, transfer.port, is_master=False, wait_for_workers=False, timeout=self._timeout)
        store = PrefixStore(transfer.group_id, server)
        open_group = self._open_nccl if self._device.type == "cuda" else self._open_gloo
        self._group = open_group(transfer, store, rank)
        nonces = b"".join(self._gather(secrets.token_bytes(_NONCE_BYTES), transfer.world_size))
        proofs = self._gather(hmac.digest(self._key, b"%d " % rank + nonces, "sha256"), transfer.world_size)
        for other, proof in enumerate(proofs):
            if not hmac.compare_digest(proof, hmac.digest(self._key, b"%d " % other + nonces, "sha256")):
                raise WeightsError(f"what connected as rank {other} of a weight transfer does not have the run's secret")

    def _open_gloo(self, transfer: TransferRound, store: PrefixStore, rank: int) -> Any:
        options = cast("Any", ProcessGroupGloo)._Options()  # which the public class does not declare
        options._timeout = self._timeout
        options._devices = [ProcessGroupGloo.create_device(hostname=address_towards(transfer.host))]
        return ProcessGroupGloo(store, rank, transfer.world_size, options)

    def _open_nccl(self, transfer: TransferRound, store: PrefixStore, rank: int) -> Any:
        from torch._C._distributed_c10d import ProcessGroupNCCL

        torch.cuda.set_device(self._device)  # of this thread
        # Torch reads the variable here, and has made the groups of training. By default it ends the process if a rank is lost.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"
        return ProcessGroupNCCL(store, rank, transfer.world_size, ProcessGroupNCCL.Options())

    def _gather(self, data: bytes, size: int) -> list[bytes]:
        """Return the data of every rank, by rank. All ranks pass the same number of bytes."""
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
        parts = [torch.empty_like(own) for _ in range(size)]
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
