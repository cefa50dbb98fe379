"""Says which recorded rollouts can be scored again: those whose example is still there and starts with the same messages."""

from collections.abc import Sequence
from typing import Any

from trivet.errors import RolloutFailed
from trivet.wire.groups import RecordedConversation

EXAMPLE_GONE, PROMPT_DIFFERS = "ExampleGone", "PromptDiffers"
"""Kinds of failure of a group whose recorded rollouts are not comparable with today's data."""


def find_example(examples: Sequence[Any] | None, example_id: int) -> Any:
    """Return the example of this id.

    Raises:
        RolloutFailed: today's data has none.
    """
    num_examples = 0 if examples is None else len(examples)
    if examples is None or not 0 <= example_id < num_examples:
        raise RolloutFailed(f"example {example_id} is gone: the data has {num_examples} examples", kind=EXAMPLE_GONE)
    return examples[example_id]


def require_same_prompt(prompt: Sequence[dict[str, Any]], recorded: RecordedConversation) -> None:
    """Compare role and text of each message of `prompt`, which today's example starts with, with the recorded ones.

    Raises:
        RolloutFailed: one differs.
    """
    if _texts(prompt) != _texts(recorded.prompt):
        raise RolloutFailed("the prompt of the example differs from the recorded one", kind=PROMPT_DIFFERS)


def _texts(messages: Sequence[dict[str, Any]]) -> list[tuple[Any, Any]]:
    return [(message.get("role"), message.get("content")) for message in messages]
