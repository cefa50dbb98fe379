"""Recognises weights directories that hold an adapter instead of a whole model, and finds the model of each."""

import json
from pathlib import Path

from trivet.errors import WeightsError

ADAPTER_CONFIG = "adapter_config.json"
"""PEFT's name of the file that makes a directory an adapter."""


def is_adapter(directory: Path) -> bool:
    """Return whether `directory` holds an adapter."""
    return (directory / ADAPTER_CONFIG).exists()


def base_of(directory: Path) -> str:
    """Return the model that the adapter in `directory` was trained with, as its configuration names it."""
    path = directory / ADAPTER_CONFIG
    try:
        base = json.loads(path.read_bytes())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise WeightsError(f"{path} is no description of an adapter: {type(exc).__name__}: {exc}") from exc
    if not isinstance(base, str) or not base:
        raise WeightsError(f"{path} names no base model: base_model_name_or_path is {base!r}")
    return base


def is_same_model(name: str, other: str) -> bool:
    """Return whether two names mean one model, or two ways to the same directory."""
    return name == other or (Path(name).is_dir() and Path(name).resolve() == Path(other).resolve())
