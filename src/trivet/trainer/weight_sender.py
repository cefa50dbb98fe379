"""Sends published policies from the trainer's rank 0 into the memory of the inference servers, on a thread of its own.

consumes: rounds that the orchestrator announced (`transport.zeromq`); the files of weights/step_N, whose pages are still in memory
produces: the files of a policy, in the memory of every worker of the round
waits for: a round; the workers, for at most the round's timeout in each exchange
unblocked by: `begin`; the workers. Training never waits for this thread, and no failure here ends the trainer
"""

import logging
import queue
import threading
from collections.abc import Iterator

import torch

from trivet.config.layout import RunLayout
from trivet.errors import WeightsError
from trivet.transfer.group import TransferGroup
from trivet.weights.manifest import verify_manifest
from trivet.wire.versions import TransferRound

logger = logging.getLogger(__name__)


class WeightSender:
    """Serves one round after the other. A round that waits is dropped for a newer one: its servers have given it up."""

    def __init__(self, layout: RunLayout, *, device: torch.device, key: bytes) -> None:
        """Start the thread.

        Args:
            device: the GPU for NCCL, the CPU for gloo.
        """
        self._layout = layout
        self._group = TransferGroup(device=device, key=key)
        self._rounds: queue.SimpleQueue[TransferRound] = queue.SimpleQueue()
        # A daemon: at the trainer's end it may wait for servers that have ended.
        threading.Thread(target=self._run, name="weight-sender", daemon=True).start()

    def begin(self, transfer: TransferRound) -> None:
        """Begin a round as soon as the one before has ended. Any thread may call this."""
        self._rounds.put(transfer)

    def _run(self) -> None:
        while True:
            transfer = self._rounds.get()
            while not self._rounds.empty():
                transfer = self._rounds.get()
            try:
                self._group.broadcast(transfer, self._map_files(transfer))
                logger.info("policy sent version=%s ranks=%s", transfer.version, transfer.world_size - 1)
            except Exception as exc:  # noqa: BLE001  whatever failed, the servers load from the files and training goes on
                logger.warning("policy not sent version=%s: %s: %s", transfer.version, type(exc).__name__, exc)

    def _map_files(self, transfer: TransferRound) -> Iterator[torch.Tensor]:
        """Yield the published files as memory. Their pages are still in main memory, because they were just written.

        Raises:
            WeightsError: the policy was removed, or is not the one that the servers expect.
        """
        directory = self._layout.weights_step(transfer.version)
        manifest = verify_manifest(directory)
        if manifest.digest != transfer.digest:
            raise WeightsError(f"{directory} has the digest {manifest.digest[:12]}, and servers expect {transfer.digest[:12]}")
        for name, record in manifest.weight_files.items():
            yield torch.from_file(str(directory / name), size=record.num_bytes, dtype=torch.uint8)
