"""The prompt of a conversation's next turn, beginning with the very tokens of an earlier one.

Written out and tokenised again, what the model sampled often becomes other tokens: other merges, other spaces in a tool call.
So the ids of an earlier turn, read and sampled, are kept wherever the chat template still says what they say, and only the text
after them is tokenised. Where the template now says something else (it leaves out the thinking of past turns), they are not.

Pure, given a tokenizer; `continued_chats` asks it for each request that names an earlier turn.
"""

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """What is needed of the model's tokenizer."""

    def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], /, *, skip_special_tokens: bool) -> str: ...


def continue_tokens(known_ids: Sequence[int], *, text: str, tokenizer: Tokenizer) -> list[int] | None:
    """
    Args:
        known_ids: prompt and completion of an earlier turn, as read and sampled.
        text: of the whole conversation, as the chat template writes it, up to where the model goes on.

    Returns:
        `known_ids` and the tokens of what `text` says beyond them; None when `text` does not begin as they do.
    """
    rest = text_after(tokenizer.decode(known_ids, skip_special_tokens=False), text=text)
    if rest is None:
        return None
    return [*known_ids, *_encode_after(known_ids, rest, tokenizer)]


def text_after(known: str, *, text: str) -> str | None:
    """What `text` says beyond `known`; None when it does not begin with it.

    White space within `known` is not compared: templates trim messages and write the JSON of tool calls in their own way.
    Nor is the character that stands for half of a letter: a completion that was cut may end with it, and its message not.
    """
    if text.startswith(known):
        return text[len(known) :]
    visible_known, visible_text = _visible(known), _visible(text)
    if not visible_text.startswith(visible_known):
        return None
    start = _start_of_last(len(visible_text) - len(visible_known), text=text)
    trailing = known[len(known.rstrip()) :]
    return text[start:].removeprefix(trailing)


_BROKEN_CHARACTER = "\ufffd"


def _visible(text: str) -> str:
    return "".join(text.replace(_BROKEN_CHARACTER, " ").split())


def _start_of_last(num_visible: int, *, text: str) -> int:
    """Where the last `num_visible` visible characters begin, with the white space before them."""
    start = len(text)
    while num_visible or (start and not _visible(text[start - 1])):
        start -= 1
        num_visible -= bool(_visible(text[start]))
    return start


def _encode_after(known_ids: Sequence[int], rest: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens of `rest` where it stands: some tokenizers treat the start of a text in their own way."""
    last = tokenizer.decode(known_ids[-1:], skip_special_tokens=False)
    token_ids = tokenizer.encode(last + rest, add_special_tokens=False)
    if token_ids[:1] == list(known_ids[-1:]):
        return token_ids[1:]
    return tokenizer.encode(rest, add_special_tokens=False)
