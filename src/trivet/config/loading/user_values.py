"""Reads TOML and JSON that a user wrote within limits, so that no input ends a command in a traceback or takes its memory.

Called wherever configurations, flags, variables and data are read. A text that breaks a limit is a ValueError.
"""

import codecs
import json
import tomllib
from pathlib import Path

from trivet.config.tables import as_list, as_table

MAX_DEPTH = 64
"""Tables and lists inside each other, and parts of a dotted key. Definitions of tools, the deepest that is known, have about 15."""
MAX_INTEGER = 2**63 - 1
"""The range that TOML promises."""
MAX_TOML_BYTES = 1 << 20
"""Configurations have some KB; tomllib reads about 1 MB a second."""


def read_toml_file(path: Path) -> dict[str, object]:
    """Return the content of a TOML file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is too large, is no text, is no TOML, or breaks a limit.
    """
    with path.open("rb") as file:
        data = file.read(MAX_TOML_BYTES + 1)
    if len(data) > MAX_TOML_BYTES:
        raise ValueError(f"it is larger than {MAX_TOML_BYTES >> 20} MiB")
    try:
        content: dict[str, object] = tomllib.loads(decode_text(data))
    except RecursionError:
        raise ValueError(_describe_depth()) from None
    require_limits(content)
    return content


def decode_text(data: bytes) -> str:
    """Return the text of a file, without its byte order mark: in UTF-8, or in UTF-16 if it has one.

    Raises:
        ValueError: it is in another encoding; names the line.
    """
    encoding = "utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as exc:
        line = data[: exc.start].count(b"\n") + 1
        raise ValueError(f"line {line} is not text in UTF-8 (byte {data[exc.start]:#04x}); save the file in UTF-8") from None


def parse_json(text: str) -> object:
    """Return the value of a JSON text.

    Raises:
        json.JSONDecodeError: it is no JSON.
        ValueError: it is nested too deep, or holds an integer of thousands of digits.
    """
    try:
        value: object = json.loads(text)
    except RecursionError:
        raise ValueError(_describe_depth()) from None
    if text.count("[") + text.count("{") > MAX_DEPTH:  # else it cannot be nested deeper
        _require_depth(value)
    return value


def require_limits(value: object) -> None:
    """Refuse a value that is too large to handle.

    Raises:
        ValueError: `value` is nested too deep, or holds an integer beyond 64 bits.
    """
    for inner in _require_depth(value):
        if isinstance(inner, int) and not -MAX_INTEGER <= inner <= MAX_INTEGER:
            raise ValueError(f"an integer has more than 64 bits: {describe_integer(inner)}")


def describe_integer(value: int) -> str:
    """Return `value`, or its length where it would fill the screen or Python refuses to write it."""
    return str(value) if abs(value) < 10**40 else f"a number of {value.bit_length()} bits"


def _require_depth(value: object) -> list[object]:
    """Return every value inside `value` that holds no others."""
    level, scalars = [value], list[object]()
    for _ in range(MAX_DEPTH + 1):
        below: list[object] = []
        for item in level:
            if (table := as_table(item)) is not None:
                below.extend(table.values())
            elif (items := as_list(item)) is not None:
                below.extend(items)
            else:
                scalars.append(item)
        if not below:
            return scalars
        level = below
    raise ValueError(_describe_depth())


def _describe_depth() -> str:
    return f"it is nested more than {MAX_DEPTH} levels deep"
