"""Names the adapter that makes the policy out of the start model. Every request for the policy uses it, from version 0 on.

So a completion needs no change when a new policy is loaded in the middle of it: the adapter that it uses has new weights. Before
the first policy these are zeros.
"""

from functools import partial
from typing import Any

import torch

from trivet.inference.vllm_names import LogitsProcessorWithLoRA, LoRARequest

POLICY_ADAPTER_ID = 2**20
"""Above the ids of adapters that users load, which vLLM counts from 1."""


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
