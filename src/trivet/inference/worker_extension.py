"""Adds methods to every vLLM worker that the API server calls by `collective_rpc`, and names the policy's adapter on both sides.

The policy may be an adapter of the start model. Every request for the policy uses it, from version 0 on, so a completion needs no
change when a new policy is loaded in the middle of it: the adapter has new weights. Before the first policy these are zeros.

On the CPU it works around faults of vLLM 0.29 to 0.32: a hot reload leaves weights that were packed at the start as they were.
`ParallelLMHead.cpu_linear` closes over weights that are packed when the model is first loaded. `reload_weights` replaces the
parameter and not the closure, so outputs come from new layers and the old head. A mixture's experts are packed only before their
kernel exists, so that a reload leaves them in the layout of the files, which the kernel misreads. Neither is an error.
tests/integration/test_inference_server.py and test_families_served.py compare a server with the reloaded weights: when they pass
without `forget_expert_kernels` and `repack_lm_heads`, these can go.
"""

import os
from functools import partial
from typing import Any

import torch

from trivet.inference.vllm_names import LogitsProcessorWithLoRA, LoRARequest, VocabParallelEmbedding, current_platform
from trivet.machine import Heap

POLICY_ADAPTER_ID = 2**20
"""Above the ids of adapters that users load, which vLLM counts from 1."""
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


def policy_adapter(directory: str | None = None) -> LoRARequest:
    """Return the LoRARequest under which vLLM knows the policy's adapter.

    Args:
        directory: replace its weights by those in this directory; None keeps them.
    """
    return LoRARequest(
        lora_name="trivet-policy",
        lora_int_id=POLICY_ADAPTER_ID,
        lora_path=directory or "loaded already",
        load_inplace=directory is not None,
    )


def score_prompts_by_plain_head(model: torch.nn.Module) -> None:
    """Leave the head's adapter out of the logits of prompt tokens. May be called again.

    A prompt's log-probabilities need logits of all its tokens. vLLM 0.32 then applies the head's adapter by the indices of the
    requests that sample, which are of another number: on the CPU the engine dies. The policy's adapter has no part for the head.
    """
    for module in model.modules():
        if isinstance(module, LogitsProcessorWithLoRA):
            kernels: Any = module.punica_wrapper
            if not hasattr(kernels, "add_sampled_logits"):
                kernels.add_sampled_logits = kernels.add_lora_logits
                kernels.add_lora_logits = partial(_add_sampled_logits, kernels)


def _add_sampled_logits(kernels: Any, logits: torch.Tensor, hidden: torch.Tensor, *factors: Any) -> torch.Tensor | None:
    if len(hidden) != len(kernels.sampler_indices):
        return logits
    return kernels.add_sampled_logits(logits, hidden, *factors)


def forget_expert_kernels(model: torch.nn.Module) -> None:
    """Have the next reload pack the experts of `model`, as the first load did. Does nothing on a GPU."""
    if not current_platform.is_cpu():
        return
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def repack_lm_heads(model: torch.nn.Module) -> None:
    """Pack the current weights of every LM head of `model`. Does nothing on a GPU, where nothing is packed."""
    if not current_platform.is_cpu():
        return
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            module.quant_method.process_weights_after_loading(module)
