"""Receives policies from the trainer into a worker's main memory (`weights.transport` gloo and nccl).

`transfer_engine` calls `begin` and `take`. The files arrive while the worker generates. Once they have the sizes and digests
of its manifest, a load reads them as it would read those of a directory. So the engine pauses as long as for a directory, and a
transfer that fails does not touch the engine. Meanwhile the worker needs main memory for one more copy of the policy.
"""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors.torch import load_file

from trivet.errors import WeightsError
from trivet.storage.durable import FileRecord, hash_file
from trivet.transfer.group import TransferGroup
from trivet.wire.versions import TransferRound

Weights = list[tuple[str, torch.Tensor]]
"""The tensors of a policy with their names in its files."""


class PolicyReceiver:
    """One worker's end of transfers.

    >>> receiver = PolicyReceiver(device=torch.device("cpu"), key=key)
    >>> receiver.begin(transfer, manifest.weight_files, rank=1)
    >>> if receiver.is_done(): model.load_weights(receiver.take())
    """

    def __init__(self, *, device: torch.device, key: bytes) -> None:
        """Connect nothing yet. The arguments are those of `TransferGroup`."""
        self._group = TransferGroup(device=device, key=key)
        self._thread = ThreadPoolExecutor(1, "weight-transfer")
        self._policy: Future[Weights] | None = None

    def begin(self, transfer: TransferRound, records: dict[str, FileRecord], *, rank: int) -> None:
        """Begin to receive the files of `records`, by name. A policy that was received and not taken is dropped."""
        self._policy = self._thread.submit(self._receive, transfer, records, rank)

    def _receive(self, transfer: TransferRound, records: dict[str, FileRecord], rank: int) -> Weights:
        if not records:
            raise WeightsError(f"policy {transfer.version} has no *.safetensors")
        with ExitStack() as stack:
            files = [stack.enter_context(os.fdopen(os.memfd_create(name), "rb")) for name in records]
            paths = {name: Path(f"/proc/self/fd/{file.fileno()}") for name, file in zip(records, files, strict=True)}
            self._group.broadcast(transfer, [_allocate(paths[name], record) for name, record in records.items()], rank=rank)
            for name, record in records.items():
                if hash_file(paths[name]) != record:
                    raise WeightsError(f"{name} of policy {transfer.version} did not arrive as it was published")
            return [item for path in paths.values() for item in load_file(path).items()]  # which maps them, and copies nothing

    def is_done(self) -> bool:
        """Return whether the whole policy has arrived, as its manifest describes it; raise the error of the transfer."""
        assert self._policy is not None, "no transfer was begun"
        return self._policy.done() and bool(self._policy.result())  # there is no policy without a tensor

    def take(self) -> Weights:
        """Return the policy that arrived. Its memory is free once the tensors are."""
        assert self._policy is not None, "no transfer was begun"
        policy, self._policy = self._policy, None
        return policy.result()


def _allocate(path: Path, record: FileRecord) -> torch.Tensor:
    """Return memory that is the content of the file `path`, which gets the size in `record`."""
    return torch.from_file(str(path), shared=True, size=record.num_bytes, dtype=torch.uint8)
