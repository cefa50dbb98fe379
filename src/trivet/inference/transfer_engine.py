"""Gives a worker policies from the trainer's memory, as an engine of vLLM's interface for weight transfer.

vLLM makes one engine in each worker if `inference.arguments` names it (`weights.transport` gloo and nccl). These calls reach it:

    init_weight_transfer_engine, by `VersionedEngine.receive`: begin to receive the files (`policy_receiver`), while it generates
    start_weight_update, update_weights, finish_weight_update, by `PolicyWorkerExtension`: load them, while it is paused

vLLM means the first one to be called once. Here every round calls it, because every round has connections of its own. The interface
is that of vLLM 0.32.
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
class PolicyInitInfo(WeightTransferInitInfo):
    """Describes the policy that the trainer will send: a `TransferRound` and a `FileRecord` for each file, as built-in types."""

    backend: str
    key: bytes
    transfer: dict[str, Any]
    records: dict[str, Any]


@dataclass
class PolicyUpdateInfo(WeightTransferUpdateInfo):
    """Has no fields: `receive_weights` loads the policy that was received last."""


class PolicyTransferEngine(WeightTransferEngine[PolicyInitInfo, PolicyUpdateInfo]):
    """Receives and loads policies in one worker."""

    init_info_cls = PolicyInitInfo
    update_info_cls = PolicyUpdateInfo
    receiver: PolicyReceiver
    """Made by the first transfer."""

    def init_transfer_engine(self, init_info: PolicyInitInfo) -> None:
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

    def receive_weights(self, update_info: PolicyUpdateInfo) -> None:
        """Load the policy that was received."""
        model: Any = self.model
        model.load_weights(self.receiver.take())

    def finish_weight_update(self) -> None:
        """Convert the loaded weights to the layout of the kernels."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Do nothing: the system closes the connections when the worker's process ends."""


WeightTransferEngineFactory.register_engine(TRANSFER_ENGINE, PolicyTransferEngine)
