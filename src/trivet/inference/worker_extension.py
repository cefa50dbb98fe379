"""Adds methods to every vLLM worker, which the API server calls by `collective_rpc`, and defines the id of the policy's adapter.

The policy may be an adapter of the start model. Every request for the policy uses it, from version 0 on, so a completion needs no
change when a new policy is loaded in the middle of it: the adapter has new weights. Before the first policy these are zeros.

This module works around faults of vLLM 0.29 to 0.32, which raise no error. The first concerns reloads of GPT-OSS on every device.
The others concern packing on a CPU: vLLM stores some weights in the layout that its CPU kernels read, and packs them only when the
model is first loaded.
- GPT-OSS: a reload replaces a parameter only if its loader is called. vLLM copies the sinks, and experts that the files have as one
  stack, past their loaders, so the old ones stay. `load_gpt_oss_by_expert` calls the loaders.
- LM head: `ParallelLMHead.cpu_linear` keeps the packed weights in a closure. `reload_weights` replaces the parameter and not the
  closure, so outputs come from new layers and the old head. `repack_lm_heads` packs the new weights.
- Experts of a mixture: vLLM packs them only while their kernel does not exist. After a reload they have the layout of the files,
  which the kernel misreads. `forget_expert_kernels` removes the kernel before the reload.
The functions can go when tests/integration/test_inference_server.py and test_families_served.py, which compare a server with the
reloaded weights, pass without them.
"""

import os
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch

import trivet.inference.transfer_engine  # noqa: F401  registers the engine before vLLM makes it
from trivet.inference.vllm_names import (
    LogitsProcessorWithLoRA,
    LoRARequest,
    ParallelLMHead,
    VocabParallelEmbedding,
    apply_sampling_constraints,
    current_platform,
    get_tensor_model_parallel_rank,
)
from trivet.machine import Heap

POLICY_ADAPTER_ID = 2**20
"""The adapter's id in vLLM. It is above the ids of adapters that users load, which vLLM counts from 1."""
_heap = Heap()
"""The heap of this worker process. After a load its unused memory is given back to the system."""


def expand_to_drafts(
    values: torch.Tensor, ends: torch.Tensor, num_drafts: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeat the value of each request, such as its temperature, for each of its drafts. `ends` are their cumulative numbers.

    Replaces a function of vLLM 0.32 that returns uninitialized memory on a CPU, because its kernel fills a copy.
    """
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    return torch.where(values == replace_from, replace_to, values).repeat_interleave(counts, output_size=num_drafts)


if current_platform.is_cpu():
    apply_sampling_constraints.__globals__["expand_batch_to_tokens"] = expand_to_drafts


class PolicyWorkerExtension:
    """A base class that vLLM adds to its worker class (`worker_extension_cls`)."""

    model_runner: Any
    """Set by the worker."""
    weight_transfer_engine: Any
    """Set by the worker: a `PolicyTransferEngine` if `inference.weights_transport` is gloo or nccl, else None."""

    def load_policy(self, directory: str, is_received: bool = False) -> None:
        """Replace the served weights by those in `directory`, or by those that were received, in place."""
        worker: Any = self
        forget_expert_kernels(self.model_runner.get_model())
        load_gpt_oss_by_expert(self.model_runner.get_model())
        if is_received:
            worker.start_weight_update()
            try:
                worker.update_weights({})
                worker.finish_weight_update()
            finally:
                # vLLM 0.32 leaves this set if `finish_weight_update` fails, and would refuse every later update.
                worker._weight_update_active = False
            # Outputs of the encoder are those of the old weights. vLLM drops them after a reload, and not here.
            self.model_runner.reset_encoder_cache()
            self.model_runner.reset_mm_cache()
        else:
            worker.reload_weights(weights_path=directory)
        repack_lm_heads(self.model_runner.get_model())
        _heap.trim_if_grown()

    def is_transfer_done(self) -> bool:
        """Return whether the policy has arrived; raise the error of the transfer."""
        return self.weight_transfer_engine.receiver.is_done()

    def load_policy_adapter(self, directory: str | None) -> None:
        """Replace the policy's adapter by the one in `directory`, in place; None: by an adapter that changes nothing."""
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

    def capture_experts(self) -> None:
        """Return the experts of all tokens from now on, on a CPU (`cpu_experts`)."""
        from trivet.inference.cpu_experts import ExpertCapture

        ExpertCapture(self.model_runner)

    def ping(self) -> int:
        """Return the worker's process id. Any answer proves that the worker is not stuck."""
        return os.getpid()


def policy_adapter(directory: str | None = None) -> LoRARequest:
    """Return the LoRARequest under which vLLM knows the policy's adapter.

    Args:
        directory: the directory from which its weights are replaced; None keeps the loaded weights.
    """
    return LoRARequest(
        lora_name="trivet-policy",
        lora_int_id=POLICY_ADAPTER_ID,
        lora_path=directory or "loaded already",
        load_inplace=directory is not None,
    )


def score_prompts_by_plain_head(model: torch.nn.Module) -> None:
    """Compute the logits of prompt tokens without the head's adapter. May be called again.

    A prompt's log-probabilities need the logits of all its tokens. vLLM 0.32 applies the head's adapter to these logits with one
    index per sampling request, so the lengths differ and on the CPU the engine dies. The policy's adapter never changes the head,
    so leaving it out changes no result.
    """
    for module in model.modules():
        if isinstance(module, LogitsProcessorWithLoRA):
            kernels: Any = module.punica_wrapper
            if not hasattr(kernels, "add_sampled_logits"):
                kernels.add_sampled_logits = kernels.add_lora_logits
                kernels.add_lora_logits = partial(_add_sampled_logits, kernels)


def _add_sampled_logits(kernels: Any, logits: torch.Tensor, hidden: torch.Tensor, *factors: Any) -> torch.Tensor | None:
    """Add the head's adapter as vLLM does if there is one line of `hidden` per sampling request, else return `logits` unchanged."""
    if len(hidden) != len(kernels.sampler_indices):
        return logits
    return kernels.add_sampled_logits(logits, hidden, *factors)


def forget_expert_kernels(model: torch.nn.Module) -> None:
    """Remove the kernels of the experts of `model`, so that the next reload packs the experts. Do nothing on a GPU."""
    if not current_platform.is_cpu():
        return
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def load_gpt_oss_by_expert(model: torch.nn.Module) -> None:
    """Make `model`, if it is GPT-OSS, load experts and sinks through the loaders of their parameters. May be called again."""
    if type(model).__name__ == "GptOssForCausalLM" and "load_weights" not in vars(model):
        load: Any = model.load_weights
        model.load_weights = lambda weights: load(_split_gpt_oss(model, weights))  # type: ignore[assignment]


def _split_gpt_oss(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights with each expert by itself, as vLLM calls a loader for it. Load this rank's sinks."""
    for name, tensor in weights:
        block, is_expert, parameter = name.partition(".mlp.experts.")
        if is_expert:
            yield from ((f"{block}.mlp.experts.{index}.{parameter}", expert) for index, expert in enumerate(tensor))
            continue
        if name.endswith(".sinks"):
            sinks: Any = model.get_parameter(name.replace(".self_attn.", ".attn."))
            sinks.weight_loader(sinks, tensor.narrow(0, get_tensor_model_parallel_rank() * len(sinks), len(sinks)))
        yield name, tensor


def repack_lm_heads(model: torch.nn.Module) -> None:
    """Pack the current weights of every LM head of `model`. Do nothing on a GPU, where nothing is packed."""
    if not current_platform.is_cpu():
        return
    embeddings = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    # In a model without a head of its own the embedding is the head. Elsewhere packing it would lengthen the pause by a tenth.
    for module in [module for module in embeddings if isinstance(module, ParallelLMHead)] or embeddings:
        module.quant_method.process_weights_after_loading(module)
