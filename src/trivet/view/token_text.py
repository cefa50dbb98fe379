"""Splits samples into the text of each token, by the tokenizer next to the run's newest weights."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from trivet.config.layout import RunLayout
from trivet.step_directories import list_steps
from trivet.view.files import NotServed, read_inside

_NAME = "tokenizer.json"
_UNFINISHED = "\ufffd"
_MAX_UNFINISHED = 8
"""Tokens that a character may be spread over; after so many it is no character that is still to come."""


class TokenText:
    """Loads the run's tokenizer once it is there."""

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout
        self._tokenizer: Tokenizer | None = None

    def pieces(self, token_ids: Sequence[int]) -> list[str] | None:
        """Return one text for each token; None while the run has no tokenizer."""
        if self._tokenizer is None:
            self._tokenizer = _load(self._layout)
        return None if self._tokenizer is None else split_text(self._tokenizer, token_ids)


def split_text(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds. Where tokens make a character only together, the last of them has it."""
    pieces: list[str] = []
    start = read = 0
    before = ""
    for end in range(1, len(token_ids) + 1):
        text = tokenizer.decode(list(token_ids[start:end]), skip_special_tokens=False)
        if text.endswith(_UNFINISHED) and end - read < _MAX_UNFINISHED and end < len(token_ids):
            pieces.append("")
            continue
        pieces.append(text[len(before) :] if text.startswith(before) else tokenizer.decode([token_ids[end - 1]]))
        # The last piece stays in front of the next: some tokenizers drop a space at the start of a text.
        start, read = read, end
        before = tokenizer.decode(list(token_ids[start:end]), skip_special_tokens=False)
    return pieces


def _load(layout: RunLayout) -> Tokenizer | None:
    for path in _candidates(layout):
        try:
            return Tokenizer.from_buffer(read_inside(layout.root, path))
        except NotServed:
            continue
        except Exception:  # noqa: BLE001  # tokenizers raises the plain class for a file that it cannot read
            continue
    return None


def _candidates(layout: RunLayout) -> list[Path]:
    """Return the tokenizer files in weights/, newest first."""
    paths = [path / _NAME for path in list_steps(layout.weights).values()]
    return [path for path in reversed(paths) if path.is_file()]
