"""vLLM's engine for weight transfer, by which a worker gets policies from the trainer's memory (`weights.transport` gloo and nccl).

vLLM makes it in each worker, because its configuration names it (`inference.arguments`), and calls it in these phases:

    init_weight_transfer_engine: begin to receive the files of a policy (`policy_receiver`), while the worker generates
    start_weight_update, update_weights, finish_weight_update: load them as those of a directory, while it is paused

Each round begins with the first phase, because it has connections of its own. `PolicyLoader` calls the phases through
`VersionedEngine` and `PolicyWorkerExtension`. The interface is that of vLLM 0.32.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from trivet.inference.arguments import TRANSFER_ENGINE
from trivet.inference.policy_receiver import PolicyReceiver
from trivet.inference.vllm_names import (
    WeightTransferEngine,
    WeightTransferEngineFactory,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from trivet.storage.durable import FileRecord
from trivet.wire.versions import TransferRound


@dataclass
class Announced(WeightTransferInitInfo):
    """A policy that is about to be sent: a `TransferRound` and a `FileRecord` for each file, as built-in types."""

    backend: str
    key: bytes
    transfer: dict[str, Any]
    records: dict[str, Any]


@dataclass
class Received(WeightTransferUpdateInfo):
    """Says nothing: the policy that was received last is loaded."""


class PolicyTransferEngine(WeightTransferEngine[Announced, Received]):
    """One worker's engine."""

    init_info_cls = Announced
    update_info_cls = Received
    receiver: PolicyReceiver
    """Made by the first transfer."""

    def init_transfer_engine(self, init_info: Announced) -> None:
        """Begin to receive a policy."""
        if not hasattr(self, "receiver"):
            device = self.device if init_info.backend == "nccl" else torch.device("cpu")
            self.receiver = PolicyReceiver(device=device, key=init_info.key)
        transfer, parallel = msgspec.convert(init_info.transfer, TransferRound), self.parallel_config
        rank = transfer.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.receiver.begin(transfer, msgspec.convert(init_info.records, dict[str, FileRecord]), rank=rank)

    def start_weight_update(self) -> None:
        """Prepare the model for weights in the layout of files."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Received) -> None:
        """Load the policy that was received."""
        model: Any = self.model
        model.load_weights(self.receiver.take())

    def finish_weight_update(self) -> None:
        """Convert the loaded weights to the layout of the kernels."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Do nothing: the system closes the connections when the worker's process ends."""


WeightTransferEngineFactory.register_engine(TRANSFER_ENGINE, PolicyTransferEngine)
