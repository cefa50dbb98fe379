"""The policy as a plain Hugging Face directory, or PEFT's adapter files, in the dtype that is served.

Publishing it is `weights.publish`'s part.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trivet.config.trainer import TrainingConfig
from trivet.errors import ConfigError
from trivet.trainer.distributed import whole
from trivet.trainer.model import PolicyModel, has_adapter

_PREFIX = "causal_lm."


def load_tokenizer(config: TrainingConfig) -> PreTrainedTokenizerBase:
    """
    Raises:
        ConfigError: there is none.
    """
    name = config.tokenizer.name or config.model.name
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"no tokenizer can be loaded from {name!r}: {exc}; set tokenizer.name") from exc


def gather_weights(
    model: PolicyModel, *, dtype: torch.dtype, keep: bool, only_trained: bool = False
) -> dict[str, torch.Tensor]:
    """All parameters and buffers by their Hugging Face names, on the CPU. Collective: every rank calls it.

    A tied head is the embedding under a second name and is left out.

    Args:
        only_trained: leave out what is frozen.
        keep: false on ranks that take part but need no result; they get an empty dict.
    """
    weights: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen or (only_trained and not tensor.requires_grad):
            continue
        seen.add(id(tensor))
        full = whole(tensor.detach())
        if keep:
            full = full.to(dtype) if full.is_floating_point() else full
            weights[name.removeprefix(_PREFIX)] = full.cpu()
    return weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Exporter:
    """Writes weights together with what a server needs beside them."""

    model: PolicyModel
    tokenizer: PreTrainedTokenizerBase
    dtype: torch.dtype
    is_sharded: bool = True
    """Split into files of at most 5 GB, what servers read in parallel."""

    def gather(self, *, keep: bool) -> dict[str, torch.Tensor]:
        return gather_weights(self.model, dtype=self.dtype, keep=keep, only_trained=has_adapter(self.model.causal_lm))

    def write(self, directory: Path, weights: dict[str, torch.Tensor]) -> None:
        """Safetensors, their configuration (config.json, generation_config.json; adapter_config.json) and the tokenizer's files."""
        causal_lm = self.model.causal_lm
        if has_adapter(causal_lm):
            from trivet.trainer.lora import write_adapter

            write_adapter(directory, causal_lm, weights)
        else:
            self._write_whole(directory, weights)
        self.tokenizer.save_pretrained(directory)

    def _write_whole(self, directory: Path, weights: dict[str, torch.Tensor]) -> None:
        causal_lm = self.model.causal_lm
        # An unsharded twin without storage: it knows the saved dtype, and its names are not those of FSDP's classes.
        with torch.device("meta"):
            twin = type(causal_lm)._from_config(causal_lm.config.__class__(**causal_lm.config.to_dict()), dtype=self.dtype)
        twin.generation_config = causal_lm.generation_config
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
        twin.save_pretrained(directory, state_dict=weights, max_shard_size="5GB" if self.is_sharded else num_bytes + 1)
