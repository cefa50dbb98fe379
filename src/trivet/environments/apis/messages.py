"""Cuts messages and errors that are saved for people to read, and checks that recorded prompts equal those of today's data.

Training uses the tokens, which are never cut.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from trivet.errors import RolloutFailed
from trivet.wire.groups import RecordedConversation

EXAMPLE_GONE, PROMPT_DIFFERS = "ExampleGone", "PromptDiffers"
"""Kinds of failure of a group whose recorded rollouts are not comparable with today's data."""
_MAX_ERROR_CHARS = 2_000
_MAX_TEXT_CHARS = 200_000
"""Longer texts of messages are cut in saved rollouts. Lists of content parts are not."""


def to_messages(messages: str | Sequence[Any]) -> list[dict[str, Any]]:
    """Return the messages in the OpenAI chat form, as plain data.

    A prompt of plain text becomes one message of the role `text`, which `v0.score` turns back into text.
    """
    if isinstance(messages, str):
        return [{"role": "text", "content": messages}]
    return [
        message.model_dump(exclude_none=True, mode="json") if hasattr(message, "model_dump") else dict(message)
        for message in messages
    ]


def shorten_messages(messages: str | Sequence[Any]) -> list[dict[str, Any]]:
    """Return the messages as `to_messages` does, with long texts cut."""
    return [
        {name: cut(value, _MAX_TEXT_CHARS) if isinstance(value, str) else value for name, value in message.items()}
        for message in to_messages(messages)
    ]


def describe(error: BaseException) -> str:
    """Return the type and the text of an error, cut to a length that a log line can carry."""
    return cut(f"{type(error).__name__}: {error}")


def cut(text: str, max_chars: int = _MAX_ERROR_CHARS) -> str:
    """Return `text`, or its first `max_chars` characters with a note of its length."""
    return text if len(text) <= max_chars else f"{text[:max_chars]}… ({len(text)} characters)"


_ANSWER_FIELDS = ("answer", "target", "solution", "ground_truth", "label", "expected")
"""Names under which data sets keep the reference answer, the usual one first."""


def find_answer(record: Mapping[str, Any]) -> str:
    """Return the reference answer in a record of a data set, or in its field `info`; empty if it has none."""
    info = record.get("info")
    for fields in (record, info if isinstance(info, Mapping) else {}):
        for name in _ANSWER_FIELDS:
            if isinstance(value := fields.get(name), str | int | float) and value != "":
                return str(value)
    return ""


def find_example(examples: Sequence[Any] | None, example_id: int) -> Any:
    """Return the example of this id; raises RolloutFailed when today's data has none."""
    today = examples or ()
    if not 0 <= example_id < len(today):
        raise RolloutFailed(f"example {example_id} is gone: the data has {len(today)} examples", kind=EXAMPLE_GONE)
    return today[example_id]


def require_same_prompt(prompt: Sequence[dict[str, Any]], recorded: RecordedConversation) -> None:
    """Require that `prompt` equals the recorded prompt in roles and contents; raises RolloutFailed when it differs."""
    today, before = (
        [(message.get("role"), message.get("content")) for message in messages] for messages in (prompt, recorded.prompt)
    )
    if today != before:
        raise RolloutFailed("the prompt of the example differs from the recorded one", kind=PROMPT_DIFFERS)
