"""Merges an adapter into its base model, a whole model that any program loads. Called by `trivet merge`, outside any run."""

import warnings
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from trivet.config.layout import STABLE
from trivet.errors import ConfigError
from trivet.storage.durable import remove_directory
from trivet.weights.adapters import base_of, is_adapter
from trivet.weights.manifest import verify


def merge(adapter: Path, *, output: Path, base: str | None = None) -> str:
    """Write the base model with `adapter` merged into it to `output`, in the base model's dtype; sums are made in float32.

    Args:
        adapter: a published step, or any directory that PEFT wrote.
        output: appears whole, or not at all.
        base: the base model, if its name differs from the name during training.

    Returns:
        The base model's name.

    Raises:
        ConfigError: `adapter` is not an adapter, its base model cannot be loaded, or `output` exists already.
        WeightsError: `adapter` was published, and its files have changed since.
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
        # PEFT 0.21 asks transformers by the old name.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        merged = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload(safe_merge=True)
    staging = output.with_name(f".{output.name}.tmp")
    remove_directory(staging)
    merged.to(dtype).save_pretrained(staging)
    AutoTokenizer.from_pretrained(adapter if (adapter / "tokenizer_config.json").exists() else name).save_pretrained(staging)
    staging.rename(output)
    return name
