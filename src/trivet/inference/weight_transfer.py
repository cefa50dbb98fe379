"""Receives policies through vLLM's weight transfer API: the engine that a worker creates when `inference.weights_transport` is set.

This module and the calls in `VersionedEngine.receive` are all that trivet uses of that API; vLLM's classes come from `vllm_names`.
`PolicyLoader` drives it in four phases, each with a deadline:

    init     every worker connects, and receives the list of tensors, on a thread, while the engine generates
    start    the engine is paused; the layers are prepared for a reload
    update   the tensors are received and loaded; their fingerprint must be that of the policy's manifest
    finish   layers are processed as after a reload from files
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import torch

from trivet.errors import WeightsError
from trivet.inference.vllm_names import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    disable_mtp_completeness_check,
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from trivet.inference.worker_extension import forget_expert_kernels, load_gpt_oss_by_expert, repack_lm_heads
from trivet.transfer.group import TransferGroup
from trivet.transfer.tensors import Fingerprint
from trivet.wire.transfers import TransferHeader, TransferRound


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The argument of the phase init."""

    transfer: dict[str, Any]
    """A `TransferRound`, as built-in types."""
    key: bytes = field(repr=False)


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The argument of the phase update."""

    fingerprint: str
    """The fingerprint in the policy's manifest."""


class PolicyTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """One worker's end of a transfer."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._thread = ThreadPoolExecutor(1, "weight-transfer")
        self._group: TransferGroup | None = None
        self._header: Future[TransferHeader] | None = None
        """The phase init."""
        self._is_reloading = False
        """True while layers wait for their new weights."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Begin the phase init."""
        self._header = self._thread.submit(self._connect, init_info)

    def _connect(self, info: InitInfo) -> TransferHeader:
        transfer = msgspec.convert(info.transfer, TransferRound)
        if self._group is None or self._group.id != transfer.group_id:
            self.shutdown()
            parallel = self.parallel_config
            rank = transfer.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
            device = self.device if self.config.backend.endswith("nccl") else torch.device("cpu")
            self._group = TransferGroup(transfer, rank=rank, device=device, key=info.key)
        return self._group.receive_header(transfer.version)

    def is_connected(self) -> bool:
        """Return whether the phase init has ended; raise its error."""
        assert self._header is not None, "no transfer was begun"
        return self._header.done() and bool(self._header.result())

    def start_weight_update(self) -> None:
        """Prepare the layers for new weights."""
        assert self._header is not None, "no transfer was begun"
        self._header.result()
        forget_expert_kernels(self.model)
        load_gpt_oss_by_expert(self.model)
        self._is_reloading = True
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive all tensors and load them.

        Raises:
            WeightsError: they are not the tensors that were published.
        """
        assert self._group is not None, "no transfer was begun"
        assert self._header is not None
        fingerprint, load_weights = Fingerprint(), cast("Any", self.model).load_weights
        with disable_mtp_completeness_check():  # each bucket holds a part of the model
            for pairs in self._group.receive(self._header.result()):
                for info, tensor in pairs:
                    fingerprint.add(info, tensor)
                load_weights([(info.name, tensor.to(self.device)) for info, tensor in pairs])
        if fingerprint.digest() != update_info.fingerprint:
            raise WeightsError("the tensors that arrived are not those that were published: their fingerprint is another")

    def finish_weight_update(self) -> None:
        """Process layers that were not processed when they had all their weights."""
        finalize_layerwise_reload(self.model, self.model_config)
        self._is_reloading = False
        repack_lm_heads(self.model)

    def abort(self) -> None:
        """Close the connections. Take layers out of the reload; their weights are arbitrary until the next load."""
        self.shutdown()
        if self._is_reloading:
            self.finish_weight_update()

    def shutdown(self) -> None:
        """Close the connections."""
        if self._group is not None:
            group, self._group = self._group, None
            group.close()
