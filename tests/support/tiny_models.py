"""Tiny models with random weights, made by the script that makes the quickstart's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.scripts import load_script
from trivet.config.layout import RunLayout
from trivet.weights.manifest import Manifest
from trivet.weights.publish import publish
from trivet.wire.versions import PolicyVersion


def tiny_model_writer(*, tied: bool = True, seed: int = 0) -> Callable[[Path], None]:
    """What writes a float32 model of hidden size 64 with 2 layers, and its tokenizer, into a directory."""

    def write(directory: Path) -> None:
        script = load_script("make_tiny_model")
        tokenizer = script.make_tokenizer()
        script.make_model(tokenizer, hidden_size=64, layers=2, seed=seed, tied=tied).save_pretrained(directory)
        tokenizer.save_pretrained(directory)

    return write


def write_tiny_model(directory: Path, *, tokenizer: Any, seed: int = 0) -> None:
    """Such a model for a tokenizer that is not its own.

    Args:
        tokenizer: a fast tokenizer of transformers that knows `<|im_end|>`.
    """
    load_script("make_tiny_model").make_model(tokenizer, hidden_size=64, layers=2, seed=seed, tied=True).save_pretrained(
        directory
    )
    tokenizer.save_pretrained(directory)


def publish_tiny_model(layout: RunLayout, *, version: int, tied: bool = True) -> Manifest:
    """Other weights of the same shape, published as policy `version`."""
    write = tiny_model_writer(tied=tied, seed=1000 + version)
    return publish(layout, version=PolicyVersion(version), run_id="test", write=write)
