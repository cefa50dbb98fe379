"""Reads the files of a model that lie on this machine, without loading a weight: headers, tokens and chat template."""

import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from trivet.config.user_input import usable_path
from trivet.errors import ConfigError

_FORMATS = (
    ("*.safetensors", "model.safetensors", "model.safetensors.index.json"),
    ("*.bin", "pytorch_model.bin", "pytorch_model.bin.index.json"),
)
"""Pattern, single file and index of each format that holds weights. Everyone takes the first of them that there are files of."""
_NO_WEIGHTS = ("training_args.bin", "optimizer.bin")
"""Files of other trainers that are not read as weights."""
_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearModules:
    """The modules of a model that can have an adapter."""

    names: Sequence[str]
    """Sorted; without embedding and head."""
    has_experts: bool
    """True for a mixture of experts, whose experts are stacked into one tensor and get no adapter."""


def find_linear_modules(name: str) -> LinearModules | None:
    """Return the modules with a matrix of their own, of a directory or a downloaded model; None without safetensors here."""
    try:
        directory = usable_path(name, key="model.name")
        if not directory.is_dir():
            directory = _find_downloaded(name)
        files = find_weight_files(directory) if directory is not None else []
        headers = [read_header(file) for file in files if file.suffix == ".safetensors"]
    except (ConfigError, OSError, ValueError):
        return None  # `check_files`, or whoever loads it, says what is wrong with it
    if not headers:
        return None
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

    A ConfigError names `key` if one matches nothing.
    """

    def matching(target: str) -> list[str]:
        if any(is_called(name, target) for name in modules.names):
            return [target]
        return [name for name in modules.names if re.fullmatch(target, name)]

    found = {target: matching(target) for target in targets}
    if missing := [target for target, names in found.items() if not names]:
        there_are = ", ".join(last_parts(modules.names))
        problem = f"{key}: {missing[0]!r} is no linear module of this model; there are {there_are}"
        if modules.has_experts:
            problem += ". Its experts are one stacked tensor and get no adapter"
            if usable := [target for target in targets if found[target]]:
                problem += f"; set {key} = {json.dumps(usable)}"
        raise ConfigError(problem)
    return sorted({name for names in found.values() for name in names})


def is_called(name: str, target: str) -> bool:
    """Return whether `target` is the module's name, or the last parts of it."""
    return name == target or name.endswith(f".{target}")


def last_parts(names: Sequence[str]) -> list[str]:
    """Return the last part of each name, sorted and without repetition."""
    return sorted({name.rpartition(".")[2] for name in names})


def find_weight_files(directory: Path, *, key: str = "model.name") -> list[Path]:
    """Return the files that hold a model's weights, all of one format; nothing if there are none.

    transformers, which the trainer reads as, takes the single file, then what the index names. vLLM takes what an index of
    safetensors names, and without one every file of the format. Where these differ, a run would have two models, which a
    ConfigError refuses under `key`, as an index that cannot be read or that names a missing file.
    """
    for pattern, single, index in _FORMATS:
        here = {path.name for path in directory.glob(pattern) if path.name not in _NO_WEIGHTS}
        if not here:
            continue
        try:
            indexed = set[str](json.loads((directory / index).read_bytes())["weight_map"].values())
        except FileNotFoundError:
            indexed = None
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as exc:
            raise ConfigError(f"{key} ({directory}): {index} cannot be read as an index of weights: {exc!r}") from exc
        if missing := sorted((indexed or set()) - here):
            raise ConfigError(f"{key} ({directory}): {index} names {missing[0]}, which is not there; download or copy it again")
        trained = {single} if single in here else indexed or set()
        served = here if indexed is None or index != _FORMATS[0][2] else indexed
        if trained != served:
            raise ConfigError(
                f"{key} ({directory}) holds weights twice: the trainer would read {_list(trained)}, and the server "
                f"{_list(served)}; move what is not of this model into another directory, a stale {index} too"
            )
        return [directory / name for name in sorted(trained)]
    return []


def _list(names: set[str]) -> str:
    shown = sorted(names)
    return "nothing" if not shown else ", ".join(shown[:2]) + (f" and {len(shown) - 2} more" if len(shown) > 2 else "")


def _find_downloaded(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = [try_to_load_from_cache(name, file) for file in _FORMATS[0][1:]]
    except HFValidationError:
        return None
    return next((Path(path).parent for path in found if isinstance(path, str)), None)


def read_header(file: Path) -> dict[str, Any]:
    """Return the names of a file's tensors with their dtypes and shapes; ValueError if it is no safetensors file or cut short.

    Source: https://github.com/huggingface/safetensors, "Format": the header's length as 8 bytes, then JSON.
    """
    with file.open("rb") as opened:
        start = opened.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        num_bytes = file.stat().st_size
        if not 0 < length <= num_bytes - 8:
            raise ValueError(f"{file.name} is no safetensors file, or is cut short")
        header: dict[str, Any] = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if end != num_bytes:
        raise ValueError(f"{file.name} has {num_bytes} bytes and should have {end}: it is cut short or damaged; copy it again")
    return header


def read_chat_template(value: str, *, key: str = "chat_template") -> str:
    """Return the Jinja template that `value` names as a file, or is itself; a ConfigError names `key` if it is neither."""
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


OTHER_MEDIA = ("image_token", "audio_token", "video_token")
"""Keys of a tokenizer's configuration that name the stand-in for a picture or a sound. A model of text alone may lack its row, as
Gemma 3 1B does, and no chat template writes it."""


def read_num_rows(directory: Path) -> int | None:
    """Return how many tokens the embedding of a model has by its config.json; None where it does not say so."""
    config = _read(directory / "config.json")
    num_rows = (config.get("text_config") or config).get("vocab_size")
    return num_rows if isinstance(num_rows, int) else None


def read_tokens(directory: Path) -> dict[str, int]:
    """Return the number of each token of the tokenizer in `directory`; nothing if it is of a kind that only its code can read."""
    tokenizer = _read(directory / "tokenizer.json")
    known: Any = tokenizer.get("model", {}).get("vocab", {})
    if not isinstance(known, dict):  # a list of tokens with their scores
        known = {token: number for number, (token, _) in enumerate(known)}
    tokens = cast("dict[str, int]", known)
    if not tokens:
        return {}
    config = _read(directory / "tokenizer_config.json")
    decoder: dict[str, Any] = config.get("added_tokens_decoder") or {}
    tokens |= {added["content"]: added["id"] for added in tokenizer.get("added_tokens", ())}
    tokens |= {added["content"]: int(number) for number, added in decoder.items()}
    for key in OTHER_MEDIA:
        tokens.pop(str(config.get(key)), None)
    return tokens


def require_rows(tokens: Mapping[str, int], num_rows: int, *, model: str, tokenizer: str, key: str = "model.name") -> None:
    """Raise a ConfigError for a tokenizer that has tokens without a row in the embedding. Rows without a token are harmless."""
    beyond = {number: token for token, number in tokens.items() if number >= num_rows}
    if not beyond:
        return
    first = min(beyond)
    raise ConfigError(
        f"{key} ({model}) has an embedding of {num_rows} tokens, and the tokenizer ({tokenizer}) has {max(beyond) + 1}: "
        f"{len(beyond)} tokens have no row, the first is {beyond[first]!r} ({first}); take the tokenizer that belongs to the "
        f"model, or enlarge the model once: model.resize_token_embeddings({max(beyond) + 1}), then save_pretrained"
    )


def _read(file: Path) -> dict[str, Any]:
    """Return a file's JSON; nothing when it is not there or cannot be read, which whoever loads it says."""
    try:
        content: Any = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", content) if isinstance(content, dict) else {}
