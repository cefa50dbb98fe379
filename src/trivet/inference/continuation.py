"""Builds the prompt of a conversation's next turn so that it begins with the exact tokens of an earlier turn.

When sampled text is tokenized again, it often becomes other tokens: other merges, other spaces in a tool call. So if the chat
template still writes the text of an earlier turn, its token ids (prompt and completion) are kept, and only the text after them is
tokenized. If the template writes another text, for example without the thinking of past turns, they are not kept.

Pure, given a tokenizer. `api_server.continue_chats` calls it for each request with the token ids of an earlier turn.
"""

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """The methods of a Hugging Face tokenizer that this module calls."""

    def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of `text`."""
        ...

    def decode(self, token_ids: Sequence[int], /, *, skip_special_tokens: bool) -> str:
        """Return the text of `token_ids`."""
        ...


def continue_tokens(known_ids: Sequence[int], *, text: str, tokenizer: Tokenizer) -> list[int] | None:
    """Return `known_ids` followed by the tokens of the new text; None when `text` does not begin with the text of `known_ids`.

    Args:
        known_ids: prompt and completion of an earlier turn, as read and sampled.
        text: the whole conversation as the chat template writes it, with the prompt for the next turn.
    """
    new_text = text_after(tokenizer.decode(known_ids, skip_special_tokens=False), text=text)
    if new_text is None:
        return None
    # Some tokenizers treat the start of a text differently. So the new text is tokenized behind the last known token.
    last_text = tokenizer.decode(known_ids[-1:], skip_special_tokens=False)
    token_ids = tokenizer.encode(last_text + new_text, add_special_tokens=False)
    if token_ids[:1] == list(known_ids[-1:]):
        return [*known_ids, *token_ids[1:]]
    return [*known_ids, *tokenizer.encode(new_text, add_special_tokens=False)]


def text_after(start_text: str, *, text: str) -> str | None:
    """Return the part of `text` after `start_text`; None when `text` does not begin with `start_text`.

    Two differences are ignored. White space, because templates trim messages and write the JSON of tool calls in their own way. And
    the character that stands for an incomplete UTF-8 sequence, because a truncated completion may end with it, but not its message.
    """
    if text.startswith(start_text):
        return text[len(start_text) :]
    visible_start, visible_text = _remove_invisible(start_text), _remove_invisible(text)
    if not visible_text.startswith(visible_start):
        return None
    # Go back from the end of `text` over the visible characters that `start_text` does not have, and the white space before them.
    num_visible, index = len(visible_text) - len(visible_start), len(text)
    while num_visible or (index and not _remove_invisible(text[index - 1])):
        index -= 1
        num_visible -= bool(_remove_invisible(text[index]))
    trailing_space = start_text[len(start_text.rstrip()) :]
    return text[index:].removeprefix(trailing_space)


_BROKEN_CHARACTER = "\ufffd"
"""The character for a UTF-8 sequence whose last tokens are missing."""


def _remove_invisible(text: str) -> str:
    return "".join(text.replace(_BROKEN_CHARACTER, " ").split())
