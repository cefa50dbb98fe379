"""What a row of a data set says: its messages and the tools that were offered. Called when a row is read, and at start to check.

A row has `messages`, or `prompt` and `completion`: lists of messages, or strings, which stand for one user message and one
assistant message. `tools` beside them is a list of definitions, or the JSON text of one. Other columns are ignored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trivet.config.loading.user_values import parse_json
from trivet.errors import ConfigError

DatasetRecord = Mapping[str, Any]
ChatMessage = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    messages: Sequence[ChatMessage]
    tools: Sequence[Mapping[str, Any]] | None
    """Definitions of the tools that the model was offered."""


def read_row(row: DatasetRecord, *, place: str = "a row of the data") -> Conversation:
    """
    Args:
        place: names the row in errors.

    Raises:
        ConfigError: the row has no conversation, a message has no known role, or `tools` is not a list; names what it has.
    """
    if row.get("messages") is not None:
        messages = _as_messages(row["messages"], "user", f"`messages` of {place}")
    elif row.get("prompt") is not None and row.get("completion") is not None:
        messages = _as_messages(row["prompt"], "user", f"`prompt` of {place}")
        messages += _as_messages(row["completion"], "assistant", f"`completion` of {place}")
    else:
        missing = "" if row.keys().isdisjoint(("messages", "prompt", "completion")) else ", one of them empty"
        raise ConfigError(
            f"{place} has the columns {', '.join(map(str, sorted(row)))}{missing}; it needs `messages`, or `prompt` and "
            f"`completion`"
        )
    return Conversation(messages=messages, tools=_as_tools(row.get("tools"), place))


def _as_messages(value: Any, role: str, place: str) -> list[ChatMessage]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, Sequence):
        raise ConfigError(f"{place} must be a list of messages or text, got {value!r}")
    for number, message in enumerate(value):
        if not isinstance(message, Mapping) or "role" not in message:
            said = sorted(message) if isinstance(message, Mapping) else repr(message)
            raise ConfigError(f"message {number} in {place} must have `role` and `content`, got {said}")
        if message["role"] not in ROLES:
            raise ConfigError(
                f"the role of message {number} in {place} must be one of {', '.join(ROLES)}, got {message['role']!r}"
            )
        if message.get("weight") not in (None, 0, 1):
            raise ConfigError(f"the weight of message {number} in {place} must be 0 or 1, got {message['weight']!r}")
    return [_as_served(message) for message in value]


def _as_served(message: Mapping[str, Any]) -> ChatMessage:
    """As an inference server hands it to the template: no content is an empty one, arguments of calls are objects."""
    served = dict(message)
    if "content" in served and served["content"] is None:
        served["content"] = ""
    if served.get("tool_calls"):
        served["tool_calls"] = [_call_as_served(call) for call in served["tool_calls"]]
    return served


def _call_as_served(call: Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _call_as_served(call["function"])}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        return {**call, "arguments": parse_json(arguments)}
    except ValueError:
        return call  # text that is no JSON reaches the template as it is


def _as_tools(value: Any, place: str) -> Sequence[Mapping[str, Any]] | None:
    if isinstance(value, str):
        try:
            value = parse_json(value) if value else None
        except ValueError as exc:
            raise ConfigError(f"`tools` of {place} is text and not JSON: {exc}") from exc
    if value is not None and (not isinstance(value, Sequence) or not all(isinstance(tool, Mapping) for tool in value)):
        raise ConfigError(f"`tools` of {place} must be a list of definitions, got {value!r}")
    return value or None
