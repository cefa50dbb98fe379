"""Works around a fault of vLLM 0.29 to 0.32 on the CPU: a hot reload leaves the LM head's packed weights as they were.

`ParallelLMHead.cpu_linear` closes over weights that are packed when the model is first loaded; `reload_weights` replaces the
parameter and not the closure. Outputs then come from new layers and the old head, without an error. Packing again after each
reload fixes it. tests/integration/test_inference_server.py compares greedy outputs after a reload with those of a
fresh engine: when that test passes without the call of `repack_lm_heads`, this file can go.
"""

import torch

from trivet.inference.vllm_names import VocabParallelEmbedding, current_platform


def repack_lm_heads(model: torch.nn.Module) -> None:
    """Pack the current weights of every LM head of `model`. Does nothing on a GPU, where nothing is packed."""
    if not current_platform.is_cpu():
        return
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            module.quant_method.process_weights_after_loading(module)
