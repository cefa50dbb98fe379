"""Works around faults of vLLM 0.29 to 0.32 on the CPU: a hot reload leaves weights that were packed at the start as they were.

`ParallelLMHead.cpu_linear` closes over weights that are packed when the model is first loaded. `reload_weights` replaces the
parameter and not the closure, so outputs come from new layers and the old head. A mixture's experts are packed only before their
kernel exists, so that a reload leaves them in the layout of the files, which the kernel misreads. Neither is an error.
tests/integration/test_inference_server.py and test_families_served.py compare a server with the reloaded weights: when they pass
without the calls of this module, it can go.
"""

from typing import Any

import torch

from trivet.inference.vllm_names import VocabParallelEmbedding, current_platform


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
