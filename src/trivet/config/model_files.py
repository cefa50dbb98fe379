"""Reads the headers of a model's files, without loading a weight. Used by `checks` and by the trainer."""

import json
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trivet.config.loading.user_paths import usable_path
from trivet.errors import ConfigError

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearModules:
    """The modules of a model that can have an adapter."""

    names: Sequence[str]
    """Sorted; without embedding and head."""
    has_experts: bool
    """True for a mixture of experts, whose experts are stacked into one tensor and get no adapter."""


def find_linear_modules(name: str) -> LinearModules | None:
    """Return the modules with a matrix of their own.

    None if the files are not here, or are no safetensors.

    Args:
        name: a directory, or a Hugging Face name, of which only what was downloaded before is looked at.
    """
    files = _find_files(name)
    if files is None:
        return None
    try:
        headers = [_read_header(file) for file in files]
    except (OSError, ValueError, struct.error):
        return None  # whoever loads it says what is wrong with it
    matrices = [
        tensor.removesuffix(".weight")
        for header in headers
        for tensor, entry in header.items()
        if tensor.endswith(".weight") and len(entry["shape"]) == 2
    ]
    # transformers stacks the matrices of experts into one parameter, which is no module.
    own = [module for module in matrices if not _EXPERT.search(f"{module}.")]
    names = sorted(module for module in own if "embed" not in module and not module.endswith("lm_head"))
    return LinearModules(names=names, has_experts=len(own) < len(matrices))


def choose_targets(targets: Sequence[str], *, modules: LinearModules, key: str = "model.lora.target_modules") -> list[str]:
    """Return `targets` of an adapter as PEFT takes them: names stay, an expression becomes the names that it matches.

    Args:
        targets: names of modules, last parts of names, or regular expressions.
        key: the key of `targets`, for the error.

    Raises:
        ConfigError: one matches nothing.
    """
    found = {target: _find_target(target, modules.names) for target in targets}
    if missing := [target for target, matching in found.items() if not matching]:
        there_are = ", ".join(last_parts(modules.names))
        problem = f"{key}: {missing[0]!r} is no linear module of this model; there are {there_are}"
        if modules.has_experts:
            problem += ". Its experts are one stacked tensor and get no adapter"
            if usable := [target for target in targets if found[target]]:
                problem += f"; set {key} = {json.dumps(usable)}"
        raise ConfigError(problem)
    return sorted({name for matching in found.values() for name in matching})


def _find_target(target: str, names: Sequence[str]) -> list[str]:
    """Return what PEFT is given for `target`; nothing when it matches no module."""
    if any(is_called(name, target) for name in names):
        return [target]
    return [name for name in names if re.fullmatch(target, name)]


def is_called(name: str, target: str) -> bool:
    """Return whether `target` is the module's name, or the last parts of it."""
    return name == target or name.endswith(f".{target}")


def last_parts(names: Sequence[str]) -> list[str]:
    """Return the last part of each name, sorted and without repetition."""
    return sorted({name.rpartition(".")[2] for name in names})


def _find_files(name: str) -> list[Path] | None:
    try:
        directory = usable_path(name, key="model.name")
    except ConfigError:
        return None
    if not directory.is_dir():
        downloaded = _find_downloaded(name)
        if downloaded is None:
            return None
        directory = downloaded
    if (single := directory / _SINGLE).is_file():
        return [single]
    try:
        placed: dict[str, str] = json.loads((directory / _INDEX).read_bytes())["weight_map"]
    except (OSError, ValueError, KeyError):
        return None
    return [directory / file for file in sorted(set(placed.values()))]


def _find_downloaded(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = [try_to_load_from_cache(name, file) for file in (_SINGLE, _INDEX)]
    except HFValidationError:
        return None
    return next((Path(path).parent for path in found if isinstance(path, str)), None)


def _read_header(file: Path) -> dict[str, Any]:
    """Return the names of a file's tensors with their shapes.

    Source: https://github.com/huggingface/safetensors, "Format": the header's length as 8 bytes, then JSON.
    """
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header: dict[str, Any] = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    return header
