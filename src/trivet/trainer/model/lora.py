"""Adds low-rank adapters to a model with PEFT, writes and reads them in PEFT's own format, and merges them into their base models.

Adapters are added before the model is sharded. The weights of adapters are master weights. All other weights are frozen and kept in
the dtype of computation.
"""

import json
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from trivet.config.layout import STABLE
from trivet.config.model_files import LinearModules, choose_targets, is_called, last_parts
from trivet.config.schema.model import LoRAConfig
from trivet.errors import ConfigError
from trivet.storage.durable import remove_directory
from trivet.weights.adapters import ADAPTER_CONFIG, base_of, is_adapter
from trivet.weights.manifest import verify

logger = logging.getLogger(__name__)

ADAPTER = "default"
"""PEFT's name of a model's only adapter; it is in no file."""
WEIGHTS_FILE = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."
"""Start of every name in PEFT's files: the modules that PEFT wraps around a model."""


def add_adapter(causal_lm: PreTrainedModel, config: LoRAConfig, *, base_name: str, dtype: torch.dtype) -> None:
    """Freeze `causal_lm` (`base_name`) and add adapters of `dtype` without memory; `initial_weights.fill` gives them values."""
    # The experts of a mixture are one parameter of three dimensions, of which PEFT makes no adapter.
    has_experts = any(parameter.ndim == 3 for parameter in causal_lm.parameters())
    modules = LinearModules(names=_names(causal_lm, only_linear=True), has_experts=has_experts)
    names = _names(causal_lm, only_linear=False)
    for module in config.modules_to_save:
        if not any(is_called(name, module) for name in names):
            raise ConfigError(
                f"model.lora.modules_to_save: {module!r} is no module of this model that can be trained whole; there are "
                f"{', '.join(last_parts(names))}"
            )
    inject_adapter_in_model(
        LoraConfig(
            task_type="CAUSAL_LM",
            base_model_name_or_path=base_name,
            r=config.rank,
            lora_alpha=config.alpha,  # type: ignore[arg-type]  declared an int, used as a number
            lora_dropout=config.dropout,
            target_modules=choose_targets(config.target_modules, modules=modules),
            modules_to_save=list(config.modules_to_save) or None,
            use_rslora=config.rslora,
        ),
        causal_lm,
        adapter_name=ADAPTER,
        low_cpu_mem_usage=True,
    )
    for parameter in causal_lm.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    if has_experts:
        logger.info("experts get no adapter and stay as they are")


def name_adapter(causal_lm: PreTrainedModel, trained: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename whole tensors from their names in `causal_lm` to the names in PEFT's files, which servers read.

    PEFT reads the names from the model's modules, so this must not be called while the model computes.
    """
    named = get_peft_model_state_dict(causal_lm, state_dict=dict(trained), adapter_name=ADAPTER, save_embedding_layers=False)
    return {_PEFT_PREFIX + name: tensor for name, tensor in named.items()}


def write_adapter(directory: Path, causal_lm: PreTrainedModel, named: Mapping[str, torch.Tensor]) -> None:
    """Write tensors that `name_adapter` renamed as an adapter that PEFT and servers load. Equal adapters have equal bytes."""
    tensors = {name: tensor.contiguous() for name, tensor in named.items()}
    save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    config = causal_lm.peft_config[ADAPTER]  # type: ignore[attr-defined]  PEFT puts it there
    assert isinstance(config, LoraConfig)
    values = config.to_dict() | {"inference_mode": True}
    described = {name: sorted(value) if isinstance(value, set) else value for name, value in values.items()}
    (directory / ADAPTER_CONFIG).write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")


def read_adapter(directory: Path, model: torch.nn.Module) -> None:
    """Give the adapter in `model.causal_lm`, sharded or not, the weights in `directory`. Collective."""
    saved = load_file(directory / WEIGHTS_FILE)
    trained: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            inner = name.removeprefix("causal_lm.").replace(f".modules_to_save.{ADAPTER}.", ".").replace(f".{ADAPTER}.", ".")
            trained[name] = saved[_PEFT_PREFIX + inner].to(parameter.dtype)
    set_model_state_dict(model, trained, options=StateDictOptions(full_state_dict=True, strict=False))


def merge(adapter: Path, *, output: Path, base: str | None = None) -> str:
    """Write the base model with `adapter` merged into it to `output`, whole or not at all; return the base model's name.

    `trivet merge` calls it, outside any run. The result has the base model's dtype; sums are made in float32.

    Args:
        adapter: a published step, whose files are verified, or any directory that PEFT wrote.
        base: the base model, if its name differs from the name during training.
    """
    if not is_adapter(adapter):
        raise ConfigError(f"{adapter} is no adapter: it has no adapter_config.json")
    if output.exists():
        raise ConfigError(f"{output} is there already; remove it, or choose another output directory")
    if (adapter / STABLE).exists():
        verify(adapter)
    name = base or base_of(adapter)
    try:
        dtype = AutoConfig.from_pretrained(name).dtype or torch.float32
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"the adapter's base model {name!r} cannot be loaded: {exc}; give another with --base") from exc
    with warnings.catch_warnings():
        # PEFT 0.21 uses an old name of transformers.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        merged = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload(safe_merge=True)
    staging = output.with_name(f".{output.name}.tmp")
    remove_directory(staging)
    merged.to(dtype).save_pretrained(staging)
    AutoTokenizer.from_pretrained(adapter if (adapter / "tokenizer_config.json").exists() else name).save_pretrained(staging)
    staging.rename(output)
    return name


def _names(causal_lm: PreTrainedModel, *, only_linear: bool) -> list[str]:
    """Return the names of modules with parameters of their own, except embedding and head, whose weights scoring reads directly."""
    excluded = (causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings())
    return [
        name
        for name, module in causal_lm.named_modules()
        if next(module.parameters(recurse=False), None) is not None
        and not any(module is other for other in excluded)
        and (isinstance(module, torch.nn.Linear) or not only_linear)
    ]
