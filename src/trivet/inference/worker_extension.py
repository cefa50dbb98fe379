"""Adds methods to every vLLM worker that the API server calls by `collective_rpc`."""

import os
from typing import Any

from trivet.inference.cpu_packing import forget_expert_kernels, repack_lm_heads
from trivet.inference.policy_adapter import POLICY_ADAPTER_ID, policy_adapter, score_prompts_by_plain_head
from trivet.process.heap import Heap

_heap = Heap()
"""The heap of the worker, which is a process of its own."""


class PolicyWorkerExtension:
    """A base class that vLLM adds to its worker class."""

    model_runner: Any
    """Set by the worker."""

    def load_policy(self, directory: str) -> None:
        """Replace the served weights by those in `directory`, in place."""
        forget_expert_kernels(self.model_runner.get_model())
        self.reload_weights(weights_path=directory)  # type: ignore[attr-defined]  a method of the worker that this extends
        repack_lm_heads(self.model_runner.get_model())
        _heap.trim_if_grown()

    def load_policy_adapter(self, directory: str | None) -> None:
        """Replace the policy's adapter by the one in `directory`, in place; None: by one that changes nothing."""
        worker: Any = self
        request = policy_adapter(directory)
        if directory is None:
            worker.remove_lora(POLICY_ADAPTER_ID)
            self.model_runner.lora_manager.add_dummy_lora(request, rank=1)
        worker.add_lora(request)
        # Loading other adapters must not evict the policy's.
        worker.pin_lora(POLICY_ADAPTER_ID)
        score_prompts_by_plain_head(self.model_runner.get_model())
        _heap.trim_if_grown()

    def ping(self) -> int:
        """Return the worker's process id. Any answer proves that the worker is not stuck."""
        return os.getpid()
