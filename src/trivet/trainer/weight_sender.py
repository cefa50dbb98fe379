"""Sends published policies from the trainer's rank 0 into the memory of the inference servers, on a thread of its own.

consumes: rounds that the orchestrator announced (`transport.zeromq`); the files of weights/step_N, whose pages are still in memory
produces: the tensors of a policy, on every worker of the round
waits for: a round; the workers, for at most the round's timeout in each exchange
unblocked by: `begin`; the workers. Training never waits for this thread, and no failure here ends the trainer
"""

import logging
import queue
import threading

import torch

from trivet.config.layout import RunLayout
from trivet.errors import WeightsError
from trivet.transfer.group import TransferGroup
from trivet.transfer.tensors import describe, map_tensors
from trivet.weights.manifest import read_manifest
from trivet.wire.transfers import TransferHeader, TransferRound

logger = logging.getLogger(__name__)


class WeightSender:
    """Serves one round after the other. A round that waits is dropped for a newer one: its servers have given it up."""

    def __init__(self, layout: RunLayout, *, device: torch.device, key: bytes) -> None:
        """Start the thread.

        Args:
            device: the GPU for NCCL, the CPU for gloo.
        """
        self._layout = layout
        self._device = device
        self._key = key
        self._rounds: queue.SimpleQueue[TransferRound] = queue.SimpleQueue()
        self._group: TransferGroup | None = None
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
                self._send(transfer)
            except Exception as exc:  # noqa: BLE001  whatever failed, the servers load from the files and training goes on
                logger.warning("policy not sent version=%s: %s: %s", transfer.version, type(exc).__name__, exc)
                self._close()

    def _send(self, transfer: TransferRound) -> None:
        if self._group is None or self._group.id != transfer.group_id:
            self._close()
            self._group = TransferGroup(transfer, rank=0, device=self._device, key=self._key)
        directory = self._layout.weights_step(transfer.version)
        try:
            read_manifest(directory)
        except WeightsError as exc:
            self._group.send_header(TransferHeader(version=transfer.version, refusal=f"the trainer does not have it: {exc}"))
            return
        tensors = map_tensors(directory)
        header = TransferHeader(version=transfer.version, tensors=[describe(*pair) for pair in tensors.items()])
        self._group.send_header(header)
        self._group.send(header, tensors)
        logger.info("policy sent version=%s ranks=%s", transfer.version, transfer.world_size - 1)

    def _close(self) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            group.close()
