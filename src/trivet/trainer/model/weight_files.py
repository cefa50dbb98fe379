"""Reads weights of a model by name, some rows of a tensor at a time, so that no rank holds more than its shards.

Called by `trainer.model.initial_weights`. Weights have three origins: safetensors, from which only the requested rows are read (or
the experts that are the rows of a stack); a model that only transformers can load, which rank 0 loads and broadcasts; and random
numbers. Rows are here those of a tensor, along its first dimension.
"""

import math
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from trivet.config.model_files import find_weight_files, read_shapes
from trivet.config.schema.model import TrainerModelConfig
from trivet.errors import ConfigError
from trivet.trainer.ranks.world import World, broadcast_bytes


class WeightSource(Protocol):
    """An origin of weights."""

    def read(self, name: str, *, shape: torch.Size, first_row: int, num_rows: int) -> torch.Tensor:
        """Return rows of a tensor of `shape`, on the CPU in any dtype. Every rank passes the same names in the same order."""
        ...


class SafetensorsWeights:
    """Weights in safetensors. Files are mapped into memory, so a rank reads only the rows that it needs."""

    def __init__(self, files: dict[str, Path]) -> None:
        """Take the file of each tensor, by the tensor's name."""
        self._files = files

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self._files.keys()

    @classmethod
    def find(cls, name: str) -> "SafetensorsWeights | None":
        """Open a directory, or a Hugging Face name, which is downloaded if needed; return None if it has no safetensors."""
        directory = Path(name)
        if not directory.is_dir():
            patterns = ["*.safetensors", "*.json"]
            directory = Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=["consolidated*"]))
        file_by_tensor: dict[str, Path] = {}
        for file in find_weight_files(directory):
            if file.suffix != ".safetensors":
                return None
            shapes = read_shapes(file)
            if twice := sorted(shapes.keys() & file_by_tensor.keys()):
                raise ConfigError(
                    f"model.name = {name!r}: the tensor {twice[0]} is in both {file_by_tensor[twice[0]].name} and {file.name}; "
                    "remove the file that is not of this model"
                )
            file_by_tensor |= dict.fromkeys(shapes, file)
        return cls(file_by_tensor) if file_by_tensor else None

    def read(self, name: str, *, shape: torch.Size, first_row: int, num_rows: int) -> torch.Tensor:
        """Read the rows from their file; see `WeightSource`."""
        return self._read(name, name, shape=shape, first_row=first_row, num_rows=num_rows)

    def _read(self, tensor: str, name: str, *, shape: torch.Size, first_row: int, num_rows: int) -> torch.Tensor:
        with safe_open(self._files[tensor], framework="pt") as file:
            saved = file.get_slice(tensor)
            _require_shape(name, torch.Size(saved.get_shape()), shape)
            return saved[first_row : first_row + num_rows] if shape else file.get_tensor(tensor)


class StackedWeights(SafetensorsWeights):
    """Weights in safetensors whose experts are matrices of their own, and one stacked parameter of the model.

    The rows of a stack are experts, so a rank reads only the matrices of the experts in its shard. Names are those of parameters.
    """

    def __init__(
        self, files: dict[str, Path], stacks: Mapping[str, Sequence[Sequence[str]]], renamed: Mapping[str, str]
    ) -> None:
        """Take the file of each tensor, by its name in the files.

        Args:
            stacks: for each stacked parameter the names of its tensors: a list for each part of an expert's matrix, such as gate
                and up, in order; in each list a name for each expert, in order.
            renamed: names in the files of all other tensors, by their names in the model.
        """
        super().__init__(files)
        self._stacks = stacks
        self._renamed = renamed

    @property
    def names(self) -> Collection[str]:
        """Names of all parameters."""
        return self._stacks.keys() | self._renamed.keys()

    @classmethod
    def convert(cls, files: SafetensorsWeights, model: PreTrainedModel) -> "StackedWeights | None":
        """Read `files` as transformers does for `model`; return None if it changes tensors in another way than to stack them."""
        transforms = get_model_conversion_mapping(model)
        renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
        converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
        parts: dict[str, dict[str, list[str]]] = {}
        renamed: dict[str, str] = {}
        for name in files.names:
            target, pattern = rename_source_key(name, renamings, converters)
            if pattern is None:
                renamed[target] = name
                continue
            found = [each for each in converters if pattern in each.source_patterns and each.target_patterns[0] in target]
            if len(found) != 1:
                return None
            converter = found[0]
            kinds = [type(operation) for operation in converter.operations]
            is_stack = kinds[:1] == [MergeModulelist] and kinds[1:] in ([], [Concatenate])
            if not is_stack or [getattr(operation, "dim", None) for operation in converter.operations] != [0, 1][: len(kinds)]:
                return None
            by_pattern = parts.setdefault(target, {each: [] for each in converter.source_patterns})
            by_pattern[pattern].append(name)
        stacks = {
            target: [sorted(names, key=dot_natural_key) for names in by_pattern.values()]
            for target, by_pattern in parts.items()
        }
        return cls(files._files, stacks, renamed)

    def read(self, name: str, *, shape: torch.Size, first_row: int, num_rows: int) -> torch.Tensor:
        """Read the rows, of a stack the matrices of the experts; see `WeightSource`."""
        if name not in self._stacks:
            return self._read(self._renamed[name], name, shape=shape, first_row=first_row, num_rows=num_rows)
        parts = self._stacks[name]
        for tensors in parts:
            _require_shape(name, torch.Size([len(tensors), *shape[1:]]), shape)
        experts = [
            torch.cat([self._read_all(tensors[index]) for tensors in parts]) for index in range(first_row, first_row + num_rows)
        ]
        if not experts:
            return torch.empty(0, *shape[1:])
        _require_shape(name, torch.Size([shape[0], *experts[0].shape]), shape)
        return torch.stack(experts)

    def _read_all(self, tensor: str) -> torch.Tensor:
        with safe_open(self._files[tensor], framework="pt") as file:
            return file.get_tensor(tensor)


class BroadcastWeights:
    """Weights that rank 0 holds whole in main memory; other ranks hold one tensor at a time."""

    def __init__(self, config: TrainerModelConfig, world: World) -> None:
        """Load the model on rank 0. Collective."""
        self._world = world
        self._weights: dict[str, torch.Tensor] = {}
        self.surplus: set[str] = set()
        """Names of tensors in the files that transformers did not load; only on rank 0."""
        self.untied: set[str] = set()
        """Names of tensors that config.json ties to others although the files hold different values; only on rank 0."""
        if world.is_main:
            # With "auto", weights are rounded to the dtype that config.json names, even if the files hold wider ones.
            dtype: Any = torch.float32 if config.compute_dtype == "float32" else "auto"
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                config.name, dtype=dtype, trust_remote_code=config.trust_remote_code, output_loading_info=True
            )
            model, report = loaded
            self.surplus = set(report["unexpected_keys"])
            # transformers removes a tensor with different values from the tied ones.
            self.untied = model.get_expanded_tied_weights_keys(all_submodels=True).keys() - model.all_tied_weights_keys.keys()
            if missing := sorted(report["missing_keys"]):
                raise ConfigError(
                    f"model.name = {config.name!r} has no weights for {len(missing)} parameters, e.g. {missing[0]}: it is another "
                    "model than its config.json says"
                )
            self._weights = dict(model.state_dict())

    def read(self, name: str, *, shape: torch.Size, first_row: int, num_rows: int) -> torch.Tensor:
        """Broadcast the tensor from rank 0 and return the rows. Collective; see `WeightSource`."""
        if self._world.is_main:
            whole = self._weights[name].contiguous()
            _require_shape(name, whole.shape, shape)
            dtype = str(whole.dtype).removeprefix("torch.").encode()
        else:
            whole, dtype = torch.empty(0), None
        if self._world.size > 1:
            dtype = broadcast_bytes(self._world, dtype)
            if not self._world.is_main:
                whole = torch.empty(shape, dtype=getattr(torch, dtype.decode()))
            dist.broadcast(whole, src=0, group=self._world.control)
        return whole[first_row : first_row + num_rows] if shape else whole


class RandomWeights:
    """Weights as the model's own initialisation draws them; they depend only on the run's seed and the module's name."""

    def __init__(self, blank: PreTrainedModel) -> None:
        """Take a model of the same kind on the meta device; it stays there."""
        self._blank = blank

    def read(self, name: str, *, shape: torch.Size, first_row: int, num_rows: int) -> torch.Tensor:
        """Draw the tensor's whole module and return the rows; see `WeightSource`."""
        path, _, last = name.rpartition(".")
        module = self._blank.get_submodule(path)
        buffers = dict(module._buffers)
        module.to_empty(device=torch.device("cpu"), recurse=False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_weight_seed(path))
            self._blank._init_weights(module)
        drawn: torch.Tensor = module._parameters[last].detach()  # type: ignore[union-attr]  the module has this parameter
        module.to_empty(device=torch.device("meta"), recurse=False)
        module._buffers.update(buffers)
        return drawn[first_row : first_row + num_rows] if shape else drawn


def draw_adapter(name: str, *, shape: torch.Size, first_row: int, num_rows: int) -> torch.Tensor:
    """Draw rows of a low-rank factor as PEFT does at the start: the first factor Kaiming-uniform, the second zero."""
    if ".lora_B." in name:
        return torch.zeros(num_rows, *shape[1:])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_weight_seed(name))
        return torch.nn.init.kaiming_uniform_(torch.empty(shape), a=math.sqrt(5))[first_row : first_row + num_rows]


def derive_weight_seed(name: str) -> int:
    """Return a seed that differs for each name and each seed of the run."""
    return (torch.initial_seed() * 1_000_003 + zlib.crc32(name.encode())) % 2**63


def _require_shape(name: str, found: torch.Size, expected: torch.Size) -> None:
    if found != expected:
        raise ConfigError(
            f"model.name: the tensor {name} has the shape {list(found)} in the files and {list(expected)} by config.json: the "
            "directory mixes two models"
        )
