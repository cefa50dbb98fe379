"""Conversations for supervised fine-tuning: read, rendered by the chat template, and dealt to steps.

A line has `messages`, or `prompt` and `completion`: lists of messages, or strings, which stand for one user message and one
assistant message. A list of tool definitions beside them, `tools`, goes to the template too. The loss falls on what the assistant
writes, its end-of-turn token included.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from trivet.algorithms.packing import PackItem
from trivet.errors import ConfigError
from trivet.wire.rollouts import Sample

Message = dict[str, Any]


def load_data(name: str) -> Sequence[Mapping[str, Any]]:
    """The lines of a JSONL file, or the rows of a directory written by `datasets`.

    Raises:
        ConfigError: there is no such file or directory, a line is not JSON, or there are no rows.
    """
    path = Path(name)
    if path.is_dir():
        rows = _load_directory(path)
    elif path.is_file():
        with path.open() as file:
            rows = [_parse_line(line, number, path) for number, line in enumerate(file, start=1) if line.strip()]
    else:
        raise ConfigError(f"data.name = {name!r} is neither a JSONL file nor a directory saved by `datasets`")
    if len(rows) == 0:
        raise ConfigError(f"data.name = {name!r} holds no rows")
    return rows


def step_indices(step: int, *, batch_size: int, num_rows: int, seed: int, does_shuffle: bool) -> list[int]:
    """Which rows step `step`, from 1, trains on. Each epoch has an order of its own; a batch may span two.

    A function of its arguments alone, so a resumed run goes on where it stopped.
    """
    first = (step - 1) * batch_size
    indices: list[int] = []
    for epoch in range(first // num_rows, (first + batch_size - 1) // num_rows + 1):
        order = np.random.default_rng(seed + epoch).permutation(num_rows) if does_shuffle else np.arange(num_rows)
        start = max(first - epoch * num_rows, 0)
        indices += order[start : first + batch_size - epoch * num_rows].tolist()
    return indices


def read_messages(row: Mapping[str, Any]) -> list[Message]:
    """
    Raises:
        ConfigError: the row has neither `messages` nor `prompt` and `completion`.
    """
    if row.get("messages") is not None:
        return list(row["messages"])
    if row.get("prompt") is not None and row.get("completion") is not None:
        return _as_messages(row["prompt"], "user") + _as_messages(row["completion"], "assistant")
    raise ConfigError(f"a row of the data has {sorted(row)}; it needs `messages`, or `prompt` and `completion`")


def to_sample(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, *, tools: Sequence[Mapping[str, Any]] | None = None
) -> Sample:
    """Token ids and loss mask of a conversation.

    Prompt and completion are tokenized apart, as they are when the model is asked.

    Args:
        tools: definitions of the tools that the model was offered.

    Raises:
        ConfigError: the template renders a message differently once another follows, so that there is no one token sequence.
    """
    token_ids: list[int] = []
    loss_mask: list[bool] = []
    done = ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        for text, is_trained in (
            (_render(messages[:index], tokenizer, tools=tools, with_prompt=True), False),
            (_render(messages[: index + 1], tokenizer, tools=tools, with_prompt=False), True),
        ):
            if not text.startswith(done):
                raise ConfigError(
                    f"the chat template rewrites earlier turns: message {index} does not continue {done[-60:]!r}; use a "
                    "template that only appends, or conversations of one assistant message"
                )
            ids = tokenizer.encode(text[len(done) :], add_special_tokens=False)
            token_ids += ids
            loss_mask += _completion_mask(ids, tokenizer) if is_trained else [False] * len(ids)
            done = text
    if loss_mask:
        loss_mask[0] = False
    return Sample(
        token_ids_T=np.array(token_ids, dtype=np.int32),
        loss_mask_T=np.array(loss_mask, dtype=np.bool_),
        logprobs_T=np.zeros(len(token_ids), dtype=np.float32),
        versions=[],
        temperature=1.0,
    )


def to_items(rows: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[PackItem]:
    return [PackItem(sample=to_sample(read_messages(row), tokenizer, tools=row.get("tools")), advantage=0.0) for row in rows]


def _completion_mask(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[bool]:
    """True up to the last end-of-turn token: what templates put behind it is never sampled."""
    ends = [index for index, token in enumerate(ids) if token == tokenizer.eos_token_id]
    length = ends[-1] + 1 if ends else len(ids)
    return [index < length for index in range(len(ids))]


def _render(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    with_prompt: bool,
) -> str:
    offered: Any = [dict(tool) for tool in tools] if tools else None
    try:
        text = tokenizer.apply_chat_template([*messages], tools=offered, tokenize=False, add_generation_prompt=with_prompt)
    except ValueError as exc:
        raise ConfigError(f"the tokenizer has no chat template: {exc}; set tokenizer.name to one that has") from exc
    assert isinstance(text, str)
    return text


def _as_messages(value: Any, role: str) -> list[Message]:
    return [{"role": role, "content": value}] if isinstance(value, str) else list(value)


def _parse_line(line: str, number: int, path: Path) -> Mapping[str, Any]:
    try:
        return json.loads(line)
    except json.JSONDecodeError as exc:
        raise ConfigError(f"{path}, line {number}, is not JSON: {exc}") from exc


def _load_directory(path: Path) -> Sequence[Mapping[str, Any]]:
    from datasets import load_from_disk

    try:
        loaded: Any = load_from_disk(path)
    except FileNotFoundError as exc:
        raise ConfigError(f"data.name = {str(path)!r} was not saved by `datasets`: {exc}") from exc
    if not isinstance(loaded, Mapping):
        return loaded
    if "train" not in loaded:
        raise ConfigError(f"data.name = {str(path)!r} has the splits {sorted(loaded)}, none of them `train`; save one split")
    return loaded["train"]
