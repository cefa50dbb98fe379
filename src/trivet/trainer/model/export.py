"""Exports the policy as a plain Hugging Face directory, or as PEFT's adapter files, in the dtype that is served.

Called by `trainer.session`; `weights.publish` makes the directory visible to readers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from trivet.config.model_files import MEDIA_TOKEN_KEYS, read_chat_template, require_embeddings
from trivet.config.schema.trainer import TrainingConfig
from trivet.errors import ConfigError
from trivet.trainer.device_copies import HostCopies
from trivet.trainer.model.policy_model import PolicyModel, has_adapter
from trivet.trainer.ranks.world import gather_tensor

_PREFIX = "causal_lm."


def load_tokenizer(config: TrainingConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer that `config` names, with its chat template if it names one."""
    name = config.tokenizer.name or config.model.name
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"no tokenizer can be loaded from {name!r}: {exc}; set tokenizer.name") from exc
    if config.tokenizer.chat_template is not None:
        tokenizer.chat_template = read_chat_template(config.tokenizer.chat_template)
    return tokenizer


def require_known_tokens(tokenizer: PreTrainedTokenizerBase, model: PolicyModel, config: TrainingConfig) -> None:
    """Refuse a tokenizer with tokens that `model` has no embedding for."""
    other_media = {getattr(tokenizer, key, None) for key in MEDIA_TOKEN_KEYS}
    tokens = {token: number for token, number in tokenizer.get_vocab().items() if token not in other_media}
    name = config.model.name
    require_embeddings(tokens, model.embedding.num_embeddings, model=name, tokenizer=config.tokenizer.name or name)


def gather_weights(
    model: PolicyModel,
    *,
    dtype: torch.dtype,
    keep: bool,
    only_trained: bool = False,
    into: Mapping[str, torch.Tensor] | None = None,
    copies: HostCopies | None = None,
) -> dict[str, torch.Tensor]:
    """Copy all parameters and buffers to the CPU, by their Hugging Face names. Collective.

    A tied head is the embedding under a second name and is left out.

    Args:
        only_trained: leave out what is frozen.
        keep: false on ranks that take part but need no result; they get an empty dict.
        into: the result of an earlier call with the same arguments; its memory is used again.
        copies: makes the copies, which are complete after its `wait`; None: the function waits for them.
    """
    host_copies = copies or HostCopies(model.head.weight.device)
    weights: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen or (only_trained and not tensor.requires_grad):
            continue
        seen.add(id(tensor))
        # Servers keep buffers, such as the balance of a mixture's experts, in the dtype that they have.
        kept_dtype = dtype if isinstance(tensor, torch.nn.Parameter) and tensor.is_floating_point() else tensor.dtype
        tensor = tensor.detach()
        # Convert before tensors are gathered and leave the device, because bf16 has half the bytes. A whole tensor in main memory
        # is converted by the copy.
        is_whole_on_host = tensor.device.type == "cpu" and not isinstance(tensor, DTensor)
        full = gather_tensor(tensor if is_whole_on_host else tensor.to(kept_dtype))
        if keep:
            name = name.removeprefix(_PREFIX)
            weights[name] = into[name] if into else host_copies.empty(full.shape, kept_dtype)
            host_copies.start(weights[name], full, does_change=tensor.dtype == kept_dtype)
    if copies is None:
        host_copies.wait()
    return weights


@dataclass(slots=True, kw_only=True)
class Exporter:
    """Copies the weights of one step, and writes them with the other files that a server needs."""

    model: PolicyModel
    tokenizer: PreTrainedTokenizerBase
    dtype: torch.dtype
    is_sharded: bool = True
    """Split the weights into files of at most 5 GB, which servers read in parallel."""
    copies: HostCopies | None = None
    """Makes the copies; None: chosen for the model's device."""
    _weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """Memory kept from step to step: allocating it costs more than the copy into it."""
    _blank_model: PreTrainedModel | None = None
    """An unsharded model without storage, which writes the weights."""
    _tokenizer_files: dict[str, bytes] = field(default_factory=dict)
    """Content of the tokenizer's files by name; they are the same at every step."""

    def gather(self, *, keep: bool) -> dict[str, torch.Tensor]:
        """Copy the weights as they are now, by the names that `write` takes. The next call uses the memory again. Collective.

        A GPU may still be copying when this returns; `write` waits for it. Only this method reads the model's weights, because the
        model may compute while `write` runs.
        """
        is_adapter = has_adapter(self.model.causal_lm)
        if self.copies is None:
            self.copies = HostCopies(self.model.head.weight.device)
        self._weights = gather_weights(
            self.model, dtype=self.dtype, keep=keep, only_trained=is_adapter, into=self._weights, copies=self.copies
        )
        if not keep:
            return {}
        if is_adapter:
            from trivet.trainer.model.lora import name_adapter

            return name_adapter(self.model.causal_lm, self._weights)
        if self._blank_model is None:
            # The sharded model cannot write: its dtype is another, and FSDP has replaced its classes.
            causal_lm = self.model.causal_lm
            with torch.device("meta"):
                own_config = causal_lm.config.__class__(**causal_lm.config.to_dict())
                self._blank_model = type(causal_lm)._from_config(own_config, dtype=self.dtype)
            self._blank_model.generation_config = causal_lm.generation_config
        return dict(self._weights)  # a copy, because writing removes entries

    def write(self, directory: Path, weights: dict[str, torch.Tensor]) -> None:
        """Write safetensors, their configuration (config.json, generation_config.json; adapter_config.json) and the tokenizer."""
        assert self.copies is not None, "gather comes first"
        self.copies.wait()
        causal_lm = self.model.causal_lm
        if has_adapter(causal_lm):
            from trivet.trainer.model.lora import write_adapter

            write_adapter(directory, causal_lm, weights)
        else:
            assert self._blank_model is not None, "gather comes first"
            num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
            max_shard_size = "5GB" if self.is_sharded else num_bytes + 1
            self._blank_model.save_pretrained(directory, state_dict=weights, max_shard_size=max_shard_size)
        if not self._tokenizer_files:
            with TemporaryDirectory() as temporary:
                # Several templates would become a directory of files; without jinja files they stay in the configuration.
                has_files = not isinstance(self.tokenizer.chat_template, dict)
                self.tokenizer.save_pretrained(temporary, save_jinja_files=has_files)
                self._tokenizer_files = {path.name: path.read_bytes() for path in Path(temporary).iterdir()}
        for name, content in self._tokenizer_files.items():
            (directory / name).write_bytes(content)
