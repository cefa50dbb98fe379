"""Write tiny models with random weights, as the quickstart does. Torch and transformers are imported when one is written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trivet.config.layout import RunLayout
from trivet.weights.manifest import Manifest
from trivet.weights.publish import publish
from trivet.wire.versions import PolicyVersion


def tiny_model_writer(*, tied: bool = True, seed: int = 0, hidden_size: int = 64, layers: int = 2) -> Callable[[Path], None]:
    """Return a function that writes a float32 model and its tokenizer into a directory."""

    def write(directory: Path) -> None:
        from trivet.examples.tiny_model import make_model, make_tokenizer

        tokenizer = make_tokenizer()
        make_model(tokenizer, hidden_size=hidden_size, layers=layers, seed=seed, tied=tied).save_pretrained(directory)
        tokenizer.save_pretrained(directory)

    return write


def write_tiny_model(directory: Path, *, tokenizer: Any, seed: int = 0) -> None:
    """Write such a model for another tokenizer.

    Args:
        tokenizer: a fast tokenizer of transformers that knows `<|im_end|>`.
    """
    from trivet.examples.tiny_model import make_model

    make_model(tokenizer, hidden_size=64, layers=2, seed=seed, tied=True).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def publish_tiny_model(layout: RunLayout, *, version: int, tied: bool = True) -> Manifest:
    """Publish other weights of the same shape as policy `version`."""
    write = tiny_model_writer(tied=tied, seed=1000 + version)
    return publish(layout, version=PolicyVersion(version), run_id="test", write=write)
