"""Reads paths that a user typed. Imports nothing that is installed: `trivet init` works before any package is there."""

import errno
import sys
from pathlib import Path

from trivet.errors import ConfigError
from trivet.shown_text import shorten

_IN_UTF8 = "unset PYTHONUTF8, or set LC_ALL=C.UTF-8"
"""What makes Python read file names and arguments as UTF-8."""


def usable_path(path: str | Path, *, key: str) -> Path:
    """Return `path` with its `~` expanded; it need not exist.

    Args:
        key: names the path in the error.

    Raises:
        ConfigError: no file can have this path.
    """
    expanded = Path(path)
    try:
        if str(path).startswith("~"):
            expanded = expanded.expanduser()
        str(expanded.absolute()).encode()  # what is written into files and messages must be text
        expanded.stat()
    except FileNotFoundError:
        return expanded
    except RuntimeError:  # pathlib's error for a home directory that is not known
        problem = "names the home directory of a user who does not exist"
    except UnicodeEncodeError:
        problem = f"cannot be the path of a file here, where paths are read in {sys.getfilesystemencoding()}: {_IN_UTF8}"
    except ValueError:
        problem = "holds a character that no path can have"
    except OSError as exc:
        if not is_hopeless(exc):
            return expanded
        problem = f"cannot be a path: {exc.strerror}"
    else:
        return expanded
    raise ConfigError(f"{key} ({shorten(str(path))}) {problem}; give another path")


def is_hopeless(error: OSError) -> bool:
    """Return whether no file can ever have the path of `error`: its name is too long, or links lead in a circle."""
    return error.errno in (errno.ENAMETOOLONG, errno.ELOOP)
