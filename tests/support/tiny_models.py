"""Write tiny models with random weights, as the quickstart does. Torch and transformers are imported when one is written."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trivet.config.layout import RunLayout
from trivet.weights.manifest import Manifest
from trivet.weights.publish import publish
from trivet.wire.versions import PolicyVersion

if TYPE_CHECKING:
    from transformers import Glm4MoeConfig


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


def make_mixture_config() -> "Glm4MoeConfig":
    """Describe a mixture of experts whose balance is a buffer: two layers, the second of four experts."""
    from transformers import Glm4MoeConfig

    return Glm4MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        pad_token_id=0,
    )
