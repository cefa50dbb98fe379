"""Writes adapters by plain PEFT, and models with an adapter merged into them, as references for our own."""

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from trivet.config.layout import RunLayout
from trivet.weights.manifest import Manifest
from trivet.weights.publish import publish
from trivet.wire.versions import PolicyVersion

TARGETS = ["q_proj", "o_proj", "gate_proj", "down_proj"]


def write_adapter(directory: Path, *, base: Path, seed: int, rank: int = 8) -> None:
    """Write a random adapter that changes the model's answers."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS, init_lora_weights=False))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.mul_(4.0)
    adapted.save_pretrained(directory)
    directory.joinpath("README.md").unlink()


def publish_adapter(layout: RunLayout, *, base: Path, version: int, rank: int = 8) -> Manifest:
    def write(directory: Path) -> None:
        write_adapter(directory, base=base, seed=version, rank=rank)

    return publish(layout, version=PolicyVersion(version), run_id="test", write=write)


def write_merged(directory: Path, *, adapter: Path, base: Path) -> Path:
    """Write a whole model that answers like `base` with `adapter`."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().save_pretrained(directory)
    AutoTokenizer.from_pretrained(base).save_pretrained(directory)
    return directory
