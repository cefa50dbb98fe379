"""Builds the prompt of a conversation's next turn so that it begins with the exact tokens of an earlier turn.

When sampled text is tokenized again, it often becomes other tokens: other merges, other spaces in a tool call. So the token ids of
an earlier turn, prompt and completion, are kept wherever the chat template still writes the same text, and only the text after
them is tokenized. Where the template writes something else (it leaves out the thinking of past turns), they are not kept.

Pure, given a tokenizer. `continued_chats` calls it for each request that names an earlier turn.
"""

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """The methods of the model's tokenizer that are used here."""

    def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of `text`."""
        ...

    def decode(self, token_ids: Sequence[int], /, *, skip_special_tokens: bool) -> str:
        """Return the text of `token_ids`."""
        ...


def continue_tokens(known_ids: Sequence[int], *, text: str, tokenizer: Tokenizer) -> list[int] | None:
    """Return `known_ids` and the tokens of the text after theirs; None when `text` does not begin with their text.

    Args:
        known_ids: prompt and completion of an earlier turn, as read and sampled.
        text: the whole conversation as the chat template writes it, with the prompt for the next turn.
    """
    rest = text_after(tokenizer.decode(known_ids, skip_special_tokens=False), text=text)
    if rest is None:
        return None
    # The rest is tokenized as a continuation: some tokenizers treat the start of a text differently.
    last = tokenizer.decode(known_ids[-1:], skip_special_tokens=False)
    token_ids = tokenizer.encode(last + rest, add_special_tokens=False)
    if token_ids[:1] == list(known_ids[-1:]):
        return [*known_ids, *token_ids[1:]]
    return [*known_ids, *tokenizer.encode(rest, add_special_tokens=False)]


def text_after(known: str, *, text: str) -> str | None:
    """Return the part of `text` after `known`; None when `text` does not begin with it.

    White space within `known` is not compared: templates trim messages and write the JSON of tool calls in their own way.
    Neither is the character that stands for an incomplete UTF-8 sequence: a truncated completion may end with it, and its message
    does not.
    """
    if text.startswith(known):
        return text[len(known) :]
    visible_known, visible_text = _visible(known), _visible(text)
    if not visible_text.startswith(visible_known):
        return None
    # The rest begins with the last visible characters that `known` does not have, and the white space before them.
    num_visible, start = len(visible_text) - len(visible_known), len(text)
    while num_visible or (start and not _visible(text[start - 1])):
        start -= 1
        num_visible -= bool(_visible(text[start]))
    trailing = known[len(known.rstrip()) :]
    return text[start:].removeprefix(trailing)


_BROKEN_CHARACTER = "\ufffd"
"""Stands for a UTF-8 sequence of which the last tokens are missing."""


def _visible(text: str) -> str:
    return "".join(text.replace(_BROKEN_CHARACTER, " ").split())
