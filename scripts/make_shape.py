"""Writes the shape of a known model without its weights: a directory that holds a config.json and nothing else.

    uv run python scripts/make_shape.py Qwen3-0.6B models/qwen3-0.6b-shape
    uv run trainer --model.name models/qwen3-0.6b-shape --model.debug.random-init --model.seq-len 16384 --bench

What a step costs depends on the shape alone: with random weights it is measured without a download. There is no tokenizer, so
such a directory cannot be trained on texts. Source of the numbers: the models' own config.json.
"""

import argparse
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

_QWEN3: dict[str, Any] = {
    "vocab_size": 151_936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}

SHAPES: dict[str, dict[str, Any]] = {
    # Of no known model: for trying a measurement on a CPU.
    "Qwen3-tiny": {
        **_QWEN3,
        "vocab_size": 1024,
        "head_dim": 32,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "Qwen3-0.6B": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "Qwen3-1.7B": {
        **_QWEN3,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "Qwen3-4B-Instruct-2507": {
        **_QWEN3,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "max_position_embeddings": 262_144,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5_000_000.0},
    },
    "Qwen3-8B": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "SmolLM2-135M": {
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    },
}


def make_config(name: str) -> PreTrainedConfig:
    """Return the configuration of a known model.

    Args:
        name: one of SHAPES.
    """
    kind, architecture = (Qwen3Config, "Qwen3ForCausalLM") if name.startswith("Qwen3") else (LlamaConfig, "LlamaForCausalLM")
    config = kind(**SHAPES[name])
    config.architectures = [architecture]
    return config


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(SHAPES))
    parser.add_argument("directory", type=Path)
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    make_config(args.name).save_pretrained(args.directory)
    print(args.directory / "config.json")


if __name__ == "__main__":
    main()
