"""Owns the names by which the user of this process knows the keys and flags of a run.

Every message names a key or a flag by `key_name`. A command with a dialect of its own, such as `vf-rl`, and `RLTrainer` use their
tables while they load a configuration. They give them to the processes that they start in the variable `TRIVET_KEY_NAMES`.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

VARIABLE = "TRIVET_KEY_NAMES"
"""The variable that holds the names, as a JSON object. Programs set it, not users."""

_names: Mapping[str, str] = {}


def key_name(key: str) -> str:
    """Return the name by which the user knows a key of a run, or a flag with its value; itself if it has no other name.

    An entry of the table that ends in a dot renames every key below it.

    >>> with use_names({"seq_len": "trainer.args.max_seq_len"}):
    ...     key_name("seq_len")
    'trainer.args.max_seq_len'
    """
    if key in _names:
        return _names[key]
    prefix = next((prefix for prefix in _names if prefix.endswith(".") and key.startswith(prefix)), None)
    return key if prefix is None else _names[prefix] + key.removeprefix(prefix)


def list_keys(*keys: str) -> str:
    """Return the names of `keys` as an enumeration, each once: two keys of a run can be one key of the user's."""
    *others, last = dict.fromkeys(key_name(key) for key in keys)
    return f"{', '.join(others)} and {last}" if others else last


@contextmanager
def use_names(names: Mapping[str, str]) -> Iterator[None]:
    """Let `key_name` answer by `names` in all threads of this process until the end of the context."""
    global _names
    before, _names = _names, names
    try:
        yield
    finally:
        _names = before


def to_variable(names: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that gives `names` to a process."""
    return {VARIABLE: json.dumps(names)}


def from_variable(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the names that the variable gives to this process; none if it is not set."""
    return json.loads(environ.get(VARIABLE, "{}"))
