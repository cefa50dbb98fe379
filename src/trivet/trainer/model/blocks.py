"""Prepares each block of a model before it is sharded: compiling, activation checkpointing, then off-loading.

Called by `trainer.model.policy_model`. Only a block's `forward` is replaced, so FSDP's hooks run around it, and parameters keep
their names.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx.experimental import _config as symbolic_shapes
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trivet.config.schema.model import ActivationCheckpointConfig, TrainerModelConfig
from trivet.errors import ConfigError
from trivet.trainer.attention.packed import TRACEABLE_ATTENTIONS, packs_rows
from trivet.trainer.model.activations import ActivationOffload, CudaTransfers

logger = logging.getLogger(__name__)

Forward = Callable[..., Any]

_NAME_PARTS = {"norm": ("norm",), "attn": ("attn", "attention"), "mlp": ("mlp", "feed_forward", "ffn")}
"""Targets of selective checkpointing that select modules by a part of the module's name, and these parts."""

_KEPT_OPERATORS = {
    "attention": frozenset(
        {
            "torch_attn::_varlen_attn",
            "aten::_scaled_dot_product_flash_attention",
            "aten::_scaled_dot_product_flash_attention_for_cpu",
            "aten::_scaled_dot_product_efficient_attention",
            "aten::_scaled_dot_product_cudnn_attention",
            "aten::_scaled_dot_product_fused_attention_overrideable",
        }
    ),
    # bmm is missing, because its outputs are the scores of an attention that is computed by matrix products.
    "products": frozenset({"aten::mm", "aten::addmm", "aten::_grouped_mm"}),
}
"""The operators whose outputs each value of `ac.keep` keeps."""


def find_blocks(causal_lm: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the repeated layers, in order, none inside another."""
    names = set(causal_lm._no_split_modules or ())
    blocks: list[torch.nn.Module] = []
    inner: set[torch.nn.Module] = set()
    for module in causal_lm.modules():
        # FSDP gives a sharded module a subclass of the module's class.
        if module not in inner and names.intersection(base.__name__ for base in type(module).__mro__):
            blocks.append(module)
            inner.update(module.modules())
    return blocks


def prepare_blocks(causal_lm: PreTrainedModel, config: TrainerModelConfig, *, attention: str, device: torch.device) -> None:
    """Apply `config.ac`, `config.compile` and `config.ac_offloading` to the blocks. `attention` is the name in transformers."""
    blocks = find_blocks(causal_lm)
    offload = None
    if config.ac_offloading is not None and device.type == "cuda":
        transfers = CudaTransfers(device, does_pin=config.ac_offloading.pin_memory)
        offload = ActivationOffload(transfers, max_inflight=config.ac_offloading.max_inflight_activations)
    elif config.ac_offloading is not None:
        logger.info("model.ac_offloading does nothing here: activations are in main memory already")
    checkpointed = blocks[:: config.ac.freq] if config.ac else []
    is_traced = attention in TRACEABLE_ATTENTIONS and config.ac is not None and bool(config.ac.keep)
    if is_traced:
        # Outside a compiled block a checkpoint could not tell operators apart, and would compute all of the block again.
        _checkpoint(checkpointed, config.ac)
    if config.compile is not None:
        _compile(blocks, attention=attention, device=device, seq_len=-(-config.seq_len // config.cp))
    if not is_traced:
        # If attention cannot be traced, a checkpoint inside would keep the whole block from being compiled.
        _checkpoint(checkpointed, config.ac)
    if offload is not None:
        for block in checkpointed:
            block.forward = offload.wrap_block(block.forward)
    if config.ac is not None:
        logger.info(
            "activation checkpointing mode=%s blocks=%s of %s keep=%s",
            config.ac.mode,
            len(checkpointed),
            len(blocks),
            ",".join(config.ac.keep) or "nothing",
        )


def _checkpoint(blocks: list[torch.nn.Module], config: ActivationCheckpointConfig | None) -> None:
    """Checkpoint `blocks`, or only their modules that `config.targets` selects. Without blocks `config` may be None."""
    for block in blocks:
        assert config is not None
        for module in [block] if config.mode == "full" else list(_select_modules(block, config.targets)):
            module.forward = _wrap_in_checkpoint(module.forward, keep=config.keep)


def _select_modules(block: torch.nn.Module, targets: list[str]) -> Iterator[torch.nn.Module]:
    """Yield the modules of `block` that `targets` select, none inside another."""
    names = [name for name, _ in block.named_modules() if name]
    for target in targets:
        if not any(_is_selected(name, target) for name in names):
            raise ConfigError(
                f"model.ac.targets: {target!r} is no part of a block of this model; there are {', '.join(_NAME_PARTS)}, and "
                f"{', '.join(sorted({name.rpartition('.')[2] for name in names}))}"
            )
    selected = [name for name in names if any(_is_selected(name, target) for target in targets)]
    for name in selected:
        if not any(name.startswith(f"{other}.") for other in selected):
            yield block.get_submodule(name)


def _is_selected(name: str, target: str) -> bool:
    last = name.rpartition(".")[2]
    if target in _NAME_PARTS:
        # The first kind counts: an attention's `q_norm` and a `post_attention_layernorm` are norms.
        kind = next((kind for kind, parts in _NAME_PARTS.items() if any(part in last for part in parts)), None)
        return kind == target
    return name == target or name.endswith(f".{target}")


def _wrap_in_checkpoint(forward: Forward, *, keep: Sequence[str]) -> Forward:
    """Wrap `forward` in a checkpoint, which restores the random state, because models draw dropout and noise in functions too."""
    options: dict[str, Any] = {}
    if keep:
        operators = frozenset[str]().union(*(_KEPT_OPERATORS[name] for name in keep))
        options["context_fn"] = partial(create_selective_checkpoint_contexts, partial(_choose_policy, operators))

    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    return run


def _choose_policy(kept: frozenset[str], context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    """Decide for one call of an operator whether its outputs are kept. Torch passes further arguments, which do not matter.

    Higher-order operators have no schema; their outputs are not kept.
    """
    is_kept = isinstance(operator, torch._ops.OpOverload) and operator._schema.name in kept
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _compile(blocks: list[torch.nn.Module], *, attention: str, device: torch.device, seq_len: int) -> None:
    require_compiler(device)
    if packs_rows(attention) and attention not in TRACEABLE_ATTENTIONS:
        # Such an attention loops over the samples of a row, so a trace of it would be compiled again for each new row.
        AttentionInterface.register(attention, torch.compiler.disable(ALL_ATTENTION_FUNCTIONS[attention]))
    # Else torch treats equal sizes as one dimension. Then a first row with as many tokens as the model has features would need
    # another graph than later rows.
    symbolic_shapes.use_duck_shape = False
    for block in blocks:
        block.forward = _specialize_full_rows(torch.compile(block.forward, dynamic=True), seq_len=seq_len)
    logger.info("blocks are compiled when they first run blocks=%s", len(blocks))


def _specialize_full_rows(compiled: Forward, *, seq_len: int) -> Forward:
    """Wrap `compiled` so that full rows, those of exactly `seq_len` tokens, have a graph of fixed sizes until another row comes.

    If all rows are full, as in a benchmark or with data of fixed length, the kernels of this graph are faster. The first row that
    is not full gets a graph for rows of any length, which later full rows use too. Rows that are only scored do not count.
    """
    are_all_full = True

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal are_all_full
        if not torch.is_grad_enabled():
            return compiled(*args, **kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.ndim > 1]
        full = [tensor for tensor in tensors if tensor.shape[1] == seq_len]
        are_all_full = are_all_full and bool(full)
        if are_all_full:
            for tensor in full:
                torch._dynamo.mark_static(tensor, 1)
        return compiled(*args, **kwargs)

    return run


def require_compiler(device: torch.device) -> None:
    """Compile a small function, and refuse a machine without a C++ compiler or, for a GPU, without triton."""
    try:
        torch.compile(lambda values: values.sin() + 1)(torch.ones(8, device=device))
    except Exception as exc:  # compilers, linkers and triton raise errors of many types
        reason = str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
        raise ConfigError(
            f"model.compile does not work on this machine ({device.type}): {reason}; install a C++ compiler (g++) and the headers "
            "of this Python, or remove model.compile"
        ) from exc
