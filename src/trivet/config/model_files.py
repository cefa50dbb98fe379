"""Reads the headers of a model's files, without loading a weight. Used by `checks` and by the trainer."""

import json
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trivet.config.loading.user_paths import usable_path
from trivet.errors import ConfigError

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_EXPERT = re.compile(r"\.experts\.\d+\.")


def find_linear_modules(name: str) -> list[str] | None:
    """Return the names of the modules with a matrix, without embedding and head.

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
    if any(_EXPERT.search(f"{module}.") for module in matrices):
        return None  # transformers makes other modules of them
    return sorted(module for module in matrices if "embed" not in module and not module.endswith("lm_head"))


def choose_targets(targets: Sequence[str], *, names: Sequence[str], key: str = "model.lora.target_modules") -> list[str]:
    """Return `targets` of an adapter as PEFT takes them: names stay, an expression becomes the names that it matches.

    Args:
        targets: names of modules, last parts of names, or regular expressions.
        names: the names of all modules that can have an adapter.
        key: the key of `targets`, for the error.

    Raises:
        ConfigError: one matches nothing.
    """
    chosen: list[str] = []
    for target in targets:
        if any(is_called(name, target) for name in names):
            chosen.append(target)
        elif matching := [name for name in names if re.fullmatch(target, name)]:
            chosen.extend(matching)
        else:
            raise ConfigError(f"{key}: {target!r} is no linear module of this model; there are {', '.join(last_parts(names))}")
    return sorted(set(chosen))


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
