"""Reads the conversation of one record of a data set: its messages and the tools that the model was offered.

A record is read when a step trains on it, and before the start to check it. It has `messages`, or `prompt` and `completion`. Each
is a list of messages or a string; a string is one message, of the assistant in `completion`, else of the user. `tools`, if
present, is a list of definitions, or such a list as JSON text. Other columns are ignored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trivet.config.user_input import parse_json
from trivet.errors import ConfigError

DatasetRecord = Mapping[str, Any]
ChatMessage = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The messages of one record, in the form that chat templates read."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Mapping[str, Any]] | None
    """Definitions of the tools that the model was offered."""


def read_conversation(record: DatasetRecord, *, place: str = "a record of the data") -> Conversation:
    """Return the conversation that `record` holds.

    Args:
        place: names the record in errors.

    Raises:
        ConfigError: the record has no conversation, a message has no known role, or `tools` is not a list.
    """
    if record.get("messages") is not None:
        messages = _as_messages(record["messages"], "user", f"`messages` of {place}")
    elif record.get("prompt") is not None and record.get("completion") is not None:
        messages = _as_messages(record["prompt"], "user", f"`prompt` of {place}")
        messages += _as_messages(record["completion"], "assistant", f"`completion` of {place}")
    else:
        missing = "" if record.keys().isdisjoint(("messages", "prompt", "completion")) else ", one of them empty"
        raise ConfigError(
            f"{place} has the columns {', '.join(map(str, sorted(record)))}{missing}; it needs `messages`, or `prompt` and "
            f"`completion`"
        )
    return Conversation(messages=messages, tools=_as_tools(record.get("tools"), place))


def _as_messages(value: Any, role: str, place: str) -> list[ChatMessage]:
    """Return a list of messages. A string becomes one message of `role`; `place` names the value in errors."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, Sequence):
        raise ConfigError(f"{place} must be a list of messages or text, got {value!r}")
    return [_as_message(message, f"message {number} in {place}") for number, message in enumerate(value)]


def _as_message(message: Any, place: str) -> ChatMessage:
    """Return the message in the form in which an inference server passes it to the chat template.

    Content that is None becomes "", and arguments of tool calls in JSON text become objects.
    """
    if not isinstance(message, Mapping) or "role" not in message:
        found = sorted(message) if isinstance(message, Mapping) else repr(message)
        raise ConfigError(f"{place} must have `role` and `content`, got {found}")
    if message["role"] not in ROLES:
        raise ConfigError(f"the role of {place} must be one of {', '.join(ROLES)}, got {message['role']!r}")
    if message.get("weight") not in (None, 0, 1):
        raise ConfigError(f"the weight of {place} must be 0 or 1, got {message['weight']!r}")
    # Chat templates cannot write other content: they would fail with an error of their own, or write its Python representation.
    content, calls = message.get("content", ""), message.get("tool_calls")
    if content is not None and not (isinstance(content, Sequence) and all(isinstance(part, Mapping | str) for part in content)):
        raise ConfigError(f"the content of {place} must be text or a list of parts, got {content!r}")
    if calls is not None and not _are_objects(calls):
        raise ConfigError(f"the tool_calls of {place} must be a list of calls, got {calls!r}")
    result = {**message, "content": "" if content is None else content} if "content" in message else dict(message)
    return {**result, "tool_calls": [_parse_arguments(call) for call in calls]} if calls else result


def _are_objects(value: Any) -> bool:
    return isinstance(value, Sequence) and all(isinstance(item, Mapping) for item in value)


def _parse_arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool call, or its `function`, with `arguments` in JSON text replaced by the object."""
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _parse_arguments(call["function"])}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        return {**call, "arguments": parse_json(arguments)}
    except ValueError:
        return call  # the template gets text that is no JSON unchanged


def _as_tools(value: Any, place: str) -> Sequence[Mapping[str, Any]] | None:
    if isinstance(value, str):
        try:
            value = parse_json(value) if value else None
        except ValueError as exc:
            raise ConfigError(f"`tools` of {place} is text and not JSON: {exc}") from exc
    if value is not None and not _are_objects(value):
        raise ConfigError(f"`tools` of {place} must be a list of definitions, got {value!r}")
    return value or None
