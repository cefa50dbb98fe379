"""Makes policies of any size for `weight_transports.py`, in the memory of one matrix.

Every tensor of a made-up model is a view of one array of random numbers, so 16 GB of weights take 1.3 GB of memory. A new policy
flips the lowest bit of a share of the numbers, which changes the same share of every large tensor, and few log-probabilities.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import TensorSpec, serialize_file
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from trivet.examples.tiny_model import make_tokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))

from make_shape import make_config

SHAPES = {2: ("Qwen3-1.7B", 14), 8: ("Qwen3-4B-Instruct-2507", 36), 16: ("Qwen3-8B", 36)}
"""The shape and the number of layers of a model, by the GB of its bf16 weights. The first has half of its layers."""
_MAX_SHARD_BYTES = 5_000_000_000
"""The trainer writes files of at most this size."""


class Policies:
    """The current policy of a model, and how it changes."""

    def __init__(
        self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, tensors: dict[str, torch.Tensor], *, seed: int = 0
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._tensors = tensors
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors.values()}
        self._arrays: list[NDArray[np.uint16]] = [
            torch.tensor([], dtype=torch.uint16).set_(storage).numpy() for storage in storages.values()
        ]
        self._random = np.random.default_rng(seed)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors.values())

    def change(self, share: float) -> None:
        """Flip the lowest bit of a `share` of the weights."""
        for array in self._arrays:
            array[self._random.integers(0, len(array), size=round(share * len(array)))] ^= 1

    def write(self, directory: Path) -> None:
        """Write the policy as the trainer does: safetensors of at most 5 GB each, configuration and tokenizer."""
        directory.mkdir(exist_ok=True)
        shards: list[dict[str, TensorSpec]] = []
        room = 0
        for name, tensor in self._tensors.items():
            num_bytes = tensor.numel() * tensor.element_size()
            if num_bytes > room:
                shards.append({})
                room = _MAX_SHARD_BYTES
            room -= num_bytes
            shards[-1][name] = TensorSpec(
                dtype="bfloat16", shape=list(tensor.shape), data_ptr=tensor.data_ptr(), data_len=num_bytes
            )
        names = {
            f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors": shard
            for number, shard in enumerate(shards, start=1)
        }
        for name, shard in names.items():
            serialize_file(shard, directory / name, metadata={"format": "pt"})
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": self.num_bytes},
                "weight_map": {tensor: name for name, shard in names.items() for tensor in shard},
            }
            (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        self._config.save_pretrained(directory)
        self._tokenizer.save_pretrained(directory)


def load_policies(directory: Path) -> Policies:
    """Start from the bf16 model in `directory`, which is one file."""
    tensors = load_file(directory / "model.safetensors")
    owned = {name: tensor.clone() for name, tensor in tensors.items()}  # a file's tensors are views of read-only memory
    config = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").config
    return Policies(config, AutoTokenizer.from_pretrained(directory), owned)


def make_policies(size_gb: int) -> Policies:
    """Make up a model.

    Args:
        size_gb: a key of `SHAPES`.
    """
    shape, num_layers = SHAPES[size_gb]
    config = make_config(shape)
    config.num_hidden_layers = num_layers
    config.layer_types = None  # made for the layers of the shape
    config = config.__class__(**config.to_dict())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    torch.manual_seed(0)
    values = torch.empty(max(shape.numel() for shape in shapes.values()), dtype=torch.bfloat16).normal_(std=0.02)
    tensors: dict[str, torch.Tensor] = {}
    first = 0
    for name, shape in shapes.items():
        first = first if first + shape.numel() <= len(values) else 0
        tensors[name] = values[first : first + shape.numel()].view(shape)
        first += shape.numel()
    return Policies(config, make_tokenizer(), tensors)
