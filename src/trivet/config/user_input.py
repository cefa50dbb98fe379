"""Reads paths, TOML and JSON that a user wrote, within limits: no input ends a command in a traceback or takes its memory.

Imports nothing that is installed: `trivet init` works before any package is there.
"""

import codecs
import errno
import json
import sys
import tomllib
from pathlib import Path

from trivet.config.tables import as_list, as_table
from trivet.errors import ConfigError
from trivet.shown_text import shorten

MAX_DEPTH = 64
"""Most levels of tables and lists in each other, and most parts of a dotted key. Definitions of tools, the deepest known values,
have about 15 levels."""
MAX_INTEGER = 2**63 - 1
"""The largest integer that TOML guarantees to support."""
MAX_TOML_BYTES = 1 << 20
"""Configurations have some KB; tomllib reads about 1 MB a second."""
_TOO_DEEP = f"it is nested more than {MAX_DEPTH} levels deep"
_IN_UTF8 = "unset PYTHONUTF8, or set LC_ALL=C.UTF-8"
"""What the user can change so that Python reads file names and arguments as UTF-8."""


def read_toml_file(path: Path) -> dict[str, object]:
    """Return the content of a TOML file; raise ValueError if it is too large, no text, no TOML, or exceeds a limit."""
    with path.open("rb") as file:
        data = file.read(MAX_TOML_BYTES + 1)
    if len(data) > MAX_TOML_BYTES:
        raise ValueError(f"it is larger than {MAX_TOML_BYTES >> 20} MiB")
    try:
        content: dict[str, object] = tomllib.loads(decode_text(data))
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    require_limits(content)
    return content


def decode_text(data: bytes) -> str:
    """Return the text of a file in UTF-8, or UTF-16 with a byte order mark. A ValueError names the line that is no text."""
    encoding = "utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as exc:
        line = data[: exc.start].count(b"\n") + 1
        raise ValueError(f"line {line} is not text in UTF-8 (byte {data[exc.start]:#04x}); save the file in UTF-8") from None


def parse_json(text: str) -> object:
    """Return the value of a JSON text; raise ValueError if it is nested too deep or holds an integer of thousands of digits."""
    try:
        value: object = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if text.count("[") + text.count("{") > MAX_DEPTH:  # with fewer brackets it cannot be nested too deep
        _collect_scalars(value)
    return value


def require_limits(value: object) -> None:
    """Raise ValueError for a value that is nested too deep or holds an integer beyond 64 bits."""
    for inner in _collect_scalars(value):
        if isinstance(inner, int) and not -MAX_INTEGER <= inner <= MAX_INTEGER:
            raise ValueError(f"an integer has more than 64 bits: {describe_integer(inner)}")


def describe_integer(value: int) -> str:
    """Return `value` as text, or its number of bits if it would fill the screen or is too long for Python to write."""
    return str(value) if abs(value) < 10**40 else f"a number of {value.bit_length()} bits"


def _collect_scalars(value: object) -> list[object]:
    """Return all values inside `value` that are neither tables nor lists; raise ValueError if it is nested too deep."""
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
    raise ValueError(_TOO_DEEP)


def usable_path(path: str | Path, *, key: str) -> Path:
    """Return `path` with its `~` expanded; it need not exist. A ConfigError names `key` if no file can have this path."""
    expanded = Path(path)
    try:
        if str(path).startswith("~"):
            expanded = expanded.expanduser()
        str(expanded.absolute()).encode()  # raises if the path cannot be written into files and messages
        expanded.stat()
    except RuntimeError:  # pathlib's error for a home directory that is not known
        problem = "names the home directory of a user who does not exist"
    except UnicodeEncodeError:
        problem = f"cannot be the path of a file here, where paths are read in {sys.getfilesystemencoding()}: {_IN_UTF8}"
    except ValueError:
        problem = "holds a character that no path can have"
    except OSError as exc:  # two errors mean that no file can have this path: a name is too long, or links form a circle
        problem = f"cannot be a path: {exc.strerror}" if exc.errno in (errno.ENAMETOOLONG, errno.ELOOP) else ""
    else:
        problem = ""
    if not problem:
        return expanded
    raise ConfigError(f"{key} ({shorten(str(path))}) {problem}; give another path")
