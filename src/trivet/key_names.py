"""Holds the user's names of the keys and flags of a run, which depend on the command that started this process.

Every message names a key or a flag by `key_name`. `vf-rl` and `RLTrainer` have keys of their own: each uses a table that gives the
user's name for a key of a run. They pass this table to the processes that they start in the variable `TRIVET_KEY_NAMES`.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

NAMES_VARIABLE = "TRIVET_KEY_NAMES"
"""The environment variable that holds the table of names, as a JSON object. Programs set it, not users."""

_names: Mapping[str, str] = {}


def key_name(key: str) -> str:
    """Return the name by which the user knows a key of a run, or a flag with its value. Without an entry it is the key itself.

    An entry whose name ends in a dot renames every key below it.

    >>> with use_names({"seq_len": "trainer.args.max_seq_len"}):
    ...     key_name("seq_len")
    'trainer.args.max_seq_len'
    """
    if key in _names:
        return _names[key]
    prefix = next((prefix for prefix in _names if prefix.endswith(".") and key.startswith(prefix)), None)
    return key if prefix is None else _names[prefix] + key.removeprefix(prefix)


def list_keys(*keys: str) -> str:
    """Return the user's names of `keys` as an enumeration, each once: two keys of a run can have the same user's name."""
    *others, last = dict.fromkeys(key_name(key) for key in keys)
    return f"{', '.join(others)} and {last}" if others else last


@contextmanager
def use_names(names: Mapping[str, str]) -> Iterator[None]:
    """Make `key_name` use the table `names` in all threads of this process, until the end of the context."""
    global _names
    previous, _names = _names, names
    try:
        yield
    finally:
        _names = previous


def names_to_variable(names: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variable that passes `names` to a new process, with its value."""
    return {NAMES_VARIABLE: json.dumps(names)}


def names_from_variable(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the table of names in this process's environment variable, an empty table if the variable is not set."""
    return json.loads(environ.get(NAMES_VARIABLE, "{}"))
