"""Makes text that others wrote safe to show: a terminal obeys escape sequences, and no encoding has lone surrogates.

Errors use it, and tools that print text from the files of a run.
"""

import sys

_MAX_SHOWN_CHARS = 200


def printable(text: str) -> str:
    """Return `text` with a backslash escape for every character that is neither printable nor a line break."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else _escape(char) for char in text)


def one_line(text: str) -> str:
    """Return `text` as `printable` does, with its line breaks escaped too."""
    return printable(text).replace("\n", "\\n")


def shorten(text: str) -> str:
    """Return `text` on one line. If it is long, its middle is left out."""
    shown = one_line(text)
    if len(shown) <= _MAX_SHOWN_CHARS:
        return shown
    half = _MAX_SHOWN_CHARS // 2
    return f"{shown[:half]} … ({len(shown)} characters) … {shown[-half:]}"


def print_error(error: object) -> None:
    """Print the error that ended a command to standard error."""
    print(f"error: {printable(str(error))}", file=sys.stderr)  # noqa: T201


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
