"""Compares a tokenizer's tokens with the rows of a model's embedding. Called by `checks.files` and by the trainer.

A token beyond the last row cannot be computed. If a tokenizer has such tokens, a run ends where the first text holds one.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from trivet.errors import ConfigError

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
    """Refuse a tokenizer that has tokens without a row in the embedding. Rows without a token are common and harmless.

    Args:
        key: the key of the model's name, for the error.

    Raises:
        ConfigError: there are such tokens; gives both numbers.
    """
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
