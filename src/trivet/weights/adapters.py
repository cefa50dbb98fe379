"""Recognises directories of weights that hold an adapter instead of a whole model, and finds the adapter's base model."""

import json
from pathlib import Path

from trivet.errors import WeightsError

ADAPTER_CONFIG = "adapter_config.json"
"""PEFT's name of the file that makes a directory an adapter."""


def is_adapter(directory: Path) -> bool:
    """Return whether `directory` holds an adapter."""
    return (directory / ADAPTER_CONFIG).exists()


def base_of(directory: Path) -> str:
    """Return the name of the base model of the adapter in `directory`, as the adapter's configuration has it."""
    path = directory / ADAPTER_CONFIG
    try:
        base = json.loads(path.read_bytes())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise WeightsError(f"{path} is no description of an adapter: {type(exc).__name__}: {exc}") from exc
    if not isinstance(base, str) or not base:
        raise WeightsError(f"{path} names no base model: base_model_name_or_path is {base!r}")
    return base


def is_same_model(name: str, other: str) -> bool:
    """Return whether two names of a model, each a directory or a Hugging Face name, are equal or lead to the same directory."""
    return name == other or (Path(name).is_dir() and Path(name).resolve() == Path(other).resolve())
