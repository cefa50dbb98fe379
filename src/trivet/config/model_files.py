"""Reads files of a model on this machine without loading its weights: file headers, tokens and the chat template."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open

from trivet.config.user_input import usable_path
from trivet.errors import ConfigError

_FORMATS = (
    ("*.safetensors", "model.safetensors", "model.safetensors.index.json"),
    ("*.bin", "pytorch_model.bin", "pytorch_model.bin.index.json"),
)
"""File pattern, single file and index of each format of weights. Trainer and server read the first format that has files."""
_NO_WEIGHTS = ("training_args.bin", "optimizer.bin")
"""Files of other trainers that match a pattern and hold no weights."""
MEDIA_TOKEN_KEYS = ("image_token", "audio_token", "video_token")
"""Keys of a tokenizer's configuration that name the placeholder token of an image, a sound or a video. A text model may have no
embedding for it, as Gemma 3 1B, and no chat template writes it."""
_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearModules:
    """The modules of a model that can have an adapter."""

    names: Sequence[str]
    """Sorted; without embedding and head."""
    has_experts: bool
    """True for a mixture of experts. Its experts are stacked into one tensor and cannot have an adapter."""


def find_linear_modules(name: str) -> LinearModules | None:
    """Return the modules of a model that have a weight matrix of their own.

    Args:
        name: the directory of a model, or the Hugging Face name of a model that is in the local cache.

    Returns None if this machine has no safetensors files of the model.
    """
    try:
        directory = usable_path(name, key="model.name")
        if not directory.is_dir():
            directory = _find_downloaded(name)
        files = find_weight_files(directory) if directory is not None else []
        shapes = [read_shapes(file) for file in files if file.suffix == ".safetensors"]
    except (ConfigError, OSError, ValueError):
        return None  # `check_files`, or the process that loads the model, reports the problem
    if not shapes:
        return None
    matrices = [
        tensor.removesuffix(".weight")
        for of_file in shapes
        for tensor, shape in of_file.items()
        if tensor.endswith(".weight") and len(shape) == 2
    ]
    # transformers stacks the matrices of all experts into one parameter, so an expert's matrix is no module.
    own = [module for module in matrices if not _EXPERT.search(f"{module}.")]
    names = sorted(module for module in own if "embed" not in module and not module.endswith("lm_head"))
    return LinearModules(names=names, has_experts=len(own) < len(matrices))


def choose_targets(targets: Sequence[str], *, modules: LinearModules, key: str = "model.lora.target_modules") -> list[str]:
    """Return the target modules of an adapter as PEFT accepts them: names stay, expressions become the names that they match.

    Raises a ConfigError that names `key` if a target matches no module.
    """

    def find_matches(target: str) -> list[str]:
        if any(is_called(name, target) for name in modules.names):
            return [target]
        return [name for name in modules.names if re.fullmatch(target, name)]

    found = {target: find_matches(target) for target in targets}
    if missing := [target for target, names in found.items() if not names]:
        available = ", ".join(last_parts(modules.names))
        problem = f"{key}: {missing[0]!r} is no linear module of this model; there are {available}"
        if modules.has_experts:
            problem += ". Its experts are one stacked tensor and get no adapter"
            if usable := [target for target in targets if found[target]]:
                problem += f"; set {key} = {json.dumps(usable)}"
        raise ConfigError(problem)
    return sorted({name for names in found.values() for name in names})


def is_called(name: str, target: str) -> bool:
    """Return whether `target` is the name of the module, or the last parts of its name."""
    return name == target or name.endswith(f".{target}")


def last_parts(names: Sequence[str]) -> list[str]:
    """Return the last part of each name, sorted and without repetition."""
    return sorted({name.rpartition(".")[2] for name in names})


def find_weight_files(directory: Path, *, key: str = "model.name") -> list[Path]:
    """Return the files that hold a model's weights, all of one format; an empty list if there are none.

    The trainer reads as transformers does: the single file if it exists, else the files that the index names. vLLM reads the files
    that an index of safetensors names, and without an index every file of the format. If these files differ, trainer and server
    would load different models.

    Raises a ConfigError that names `key` if they differ, or if an index cannot be read or names a missing file.
    """
    for pattern, single, index in _FORMATS:
        present = {path.name for path in directory.glob(pattern) if path.name not in _NO_WEIGHTS}
        if not present:
            continue
        try:
            indexed = set[str](json.loads((directory / index).read_bytes())["weight_map"].values())
        except FileNotFoundError:
            indexed = None
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as exc:
            raise ConfigError(f"{key} ({directory}): {index} cannot be read as an index of weights: {exc!r}") from exc
        if missing := sorted((indexed or set()) - present):
            raise ConfigError(f"{key} ({directory}): {index} names {missing[0]}, which is not there; download or copy it again")
        trained = {single} if single in present else indexed or set()
        served = present if indexed is None or index != _FORMATS[0][2] else indexed
        if trained != served:
            raise ConfigError(
                f"{key} ({directory}) holds weights twice: the trainer would read {_list_names(trained)}, and the server "
                f"{_list_names(served)}; move what is not of this model into another directory, a stale {index} too"
            )
        return [directory / name for name in sorted(trained)]
    return []


def _list_names(names: set[str]) -> str:
    shown = sorted(names)
    return "nothing" if not shown else ", ".join(shown[:2]) + (f" and {len(shown) - 2} more" if len(shown) > 2 else "")


def _find_downloaded(name: str) -> Path | None:
    """Return the directory of a model in the cache of Hugging Face; None if its safetensors files are not there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = [try_to_load_from_cache(name, file) for file in _FORMATS[0][1:]]
    except HFValidationError:
        return None
    return next((Path(path).parent for path in found if isinstance(path, str)), None)


def read_shapes(file: Path) -> dict[str, list[int]]:
    """Return the shape of each tensor of a safetensors file. Raises ValueError if the file is incomplete."""
    try:
        with cast(Any, safe_open(file, framework="numpy")) as opened:
            return {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118  it is no table
    except SafetensorError as exc:
        raise ValueError(f"{file.name} is no safetensors file, or is cut short or damaged ({exc}); copy it again") from exc


def read_chat_template(value: str, *, key: str = "chat_template") -> str:
    """Return the Jinja template in the file `value`, or `value` itself if it is a template. A ConfigError names `key` otherwise."""
    try:
        return Path(value).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError, ValueError) as exc:
        if any(character in value for character in "{}\n"):
            return value
        reason = exc.strerror if isinstance(exc, OSError) else str(exc)
        raise ConfigError(
            f"{key} ({value}) is neither a template nor a file that can be read ({reason}); give the path of a Jinja"
            " file, or the template itself"
        ) from exc


def read_num_embeddings(directory: Path) -> int | None:
    """Return the number of tokens in a model's embedding matrix, from config.json; None if the file does not contain it."""
    config = _read_json(directory / "config.json")
    num_embeddings = (config.get("text_config") or config).get("vocab_size")
    return num_embeddings if isinstance(num_embeddings, int) else None


def read_num_experts(directory: Path) -> int | None:
    """Return the number of experts in a model's mixtures, from config.json, 0 for a dense model; None if there is no such file."""
    config = _read_json(directory / "config.json")
    config = config.get("text_config") or config
    numbers = [config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")]
    return next((number for number in numbers if isinstance(number, int)), 0) if config else None


def read_tokens(directory: Path) -> dict[str, int]:
    """Return the id of each token of the tokenizer in `directory`; an empty table if only the tokenizer's code can read it."""
    tokenizer = _read_json(directory / "tokenizer.json")
    vocabulary: Any = tokenizer.get("model", {}).get("vocab", {})
    if not isinstance(vocabulary, dict):  # a list of tokens with their scores
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
    tokens = cast("dict[str, int]", vocabulary)
    if not tokens:
        return {}
    config = _read_json(directory / "tokenizer_config.json")
    decoder: dict[str, Any] = config.get("added_tokens_decoder") or {}
    tokens |= {added["content"]: added["id"] for added in tokenizer.get("added_tokens", ())}
    tokens |= {added["content"]: int(number) for number, added in decoder.items()}
    for key in MEDIA_TOKEN_KEYS:
        tokens.pop(str(config.get(key)), None)
    return tokens


def require_embeddings(
    tokens: Mapping[str, int], num_embeddings: int, *, model: str, tokenizer: str, key: str = "model.name"
) -> None:
    """Raise a ConfigError for a tokenizer with tokens that have no embedding. Embeddings without a token are harmless.

    Args:
        tokens: the id of each token.
        num_embeddings: the number of tokens in the model's embedding matrix.
        model, tokenizer: their names, for the message.
        key: the key that names the model, for the message.
    """
    beyond = {number: token for token, number in tokens.items() if number >= num_embeddings}
    if not beyond:
        return
    first = min(beyond)
    raise ConfigError(
        f"{key} ({model}) has an embedding of {num_embeddings} tokens, and the tokenizer ({tokenizer}) has {max(beyond) + 1}: "
        f"{len(beyond)} tokens have no row, the first is {beyond[first]!r} ({first}); take the tokenizer that belongs to the "
        f"model, or enlarge the model once: model.resize_token_embeddings({max(beyond) + 1}), then save_pretrained"
    )


def _read_json(file: Path) -> dict[str, Any]:
    """Return the table in a JSON file; an empty table if the file cannot be read. The process that loads the model reports that."""
    try:
        content: Any = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", content) if isinstance(content, dict) else {}
