"""Finds keys in a configuration model: the key at a path, and the key that a misspelled path probably means."""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import get_args, get_origin

from pydantic.fields import FieldInfo

from trivet.config.schema.base import Section, union_members

KeyPath = tuple[str | int, ...]
"""The parts of a dotted key, from the root: names, and indexes of lists."""

_MIN_LIKENESS = 0.7
"""Likeness from which a name may be a misspelling of another: `max_step` and `max_steps` have 0.94, `reward` and `wandb` 0.55."""
_MAX_NAME_CHARS = 100
"""Longer names are not compared: it would take seconds, and no key is so long."""


class Shape(StrEnum):
    """The kinds of value that a key can have."""

    SECTION = "section"
    SECTION_LIST = "section_list"
    TABLE = "table"
    """A table whose names the user chooses, such as an environment's arguments."""
    LIST = "list"
    BOOL = "bool"
    BOOL_OR_VALUE = "bool_or_value"
    """A flag that may stand alone, for true, or have a value."""
    VALUE = "value"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigKey:
    """A key of a configuration model."""

    shape: Shape
    sections: tuple[type[Section], ...] = ()
    """The models of a section or of a list of sections. There are several if a `type` key chooses one."""
    field: FieldInfo | None = None
    """The field of the model; None for the root, for an entry of a list, and for a name inside a table."""


def dotted(path: KeyPath) -> str:
    """Return a path as the user writes it: `a.0.b`."""
    return ".".join(map(str, path))


@lru_cache(maxsize=4096)
def find_key(kind: type[Section], path: KeyPath) -> ConfigKey | None:
    """Return the key of `kind` at `path`, or None. A path into a list of sections may have an index or leave it out."""
    key = ConfigKey(shape=Shape.SECTION, sections=(kind,))
    for part in path:
        if key.shape is Shape.TABLE:
            return ConfigKey(shape=Shape.VALUE)
        if key.shape is Shape.SECTION_LIST:
            key = ConfigKey(shape=Shape.SECTION, sections=key.sections)
            if isinstance(part, int) or part.isdecimal():
                continue
        fields = [section.model_fields[str(part)] for section in key.sections if str(part) in section.model_fields]
        if key.shape is not Shape.SECTION or not fields:
            return None
        key = key_of(fields[0])
    return key


def value_at(config: Section, path: KeyPath) -> object:
    """Return the value of a key, or None when a section on the way to it is not set."""
    value: object = config
    for part in path:
        value = getattr(value, str(part), None)
    return value


def all_keys(kind: type[Section], prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, ConfigKey]]:
    """Yield every key of `kind` with its path, a section before its keys, in the order of the models."""
    for name, field in kind.model_fields.items():
        key = key_of(field)
        yield (*prefix, name), key
        for section in key.sections:
            yield from all_keys(section, (*prefix, name))


def nearest_key(kind: type[Section], path: KeyPath) -> str | None:
    """Return the existing key that the unknown `path` most likely means: a sibling, or a key of this name in another section.

    Returns None if no key is similar: a wrong guess misleads more than the list of keys.
    """
    if any(len(str(part)) > _MAX_NAME_CHARS for part in path):
        return None
    num_known = next(length for length in range(len(path)) if find_key(kind, path[: length + 1]) is None)
    parent_path, unknown_name, last_name = path[:num_known], str(path[num_known]), str(path[-1])
    parent = find_key(kind, parent_path)
    siblings = [sibling for section in (parent.sections if parent else ()) for sibling in section.model_fields]
    closest = max(siblings, key=lambda sibling: _likeness(sibling, unknown_name), default="")
    if _likeness(closest, unknown_name) >= _MIN_LIKENESS:
        return dotted((*parent_path, closest))
    # No sibling is like it. The user may know the key's name, but not its section.
    paths = _all_paths(kind)
    same_name = [candidate for candidate in paths if candidate[-1] == last_name]
    candidates = same_name or [candidate for candidate in paths if _likeness(str(candidate[-1]), last_name) >= _MIN_LIKENESS]
    cutoff = 0.0 if len(same_name) == 1 else 0.6  # the only key of exactly this name is meant, wherever it is
    close = difflib.get_close_matches(dotted(path), map(dotted, candidates), n=1, cutoff=cutoff)
    return close[0] if close else None


@lru_cache
def _all_paths(kind: type[Section]) -> list[KeyPath]:
    return list(dict.fromkeys(path for path, _ in all_keys(kind)))  # sections of several types share keys


def _likeness(known: str, typed: str) -> float:
    """Return the likeness of two names, from 0 to 1. The initials of `typed` count as the name: `lr` for `learning_rate`."""
    if known == "".join(word[:1] for word in typed.split("_")):
        return 1.0
    return difflib.SequenceMatcher(None, known, typed).ratio()


def key_of(field: FieldInfo) -> ConfigKey:
    """Return the key that a field of a model defines."""
    choices = [member for member in union_members(field.annotation) if member is not type(None)]
    first, sections = choices[0], tuple(member for member in choices if _is_section(member))
    if get_origin(first) is list and _is_section(item := get_args(first)[0]):
        return ConfigKey(shape=Shape.SECTION_LIST, sections=(item,), field=field)
    if sections:
        shape = Shape.SECTION
    elif get_origin(first) is list:
        shape = Shape.LIST
    elif get_origin(first) is dict:
        shape = Shape.TABLE
    elif bool in choices:
        shape = Shape.BOOL if len(choices) == 1 else Shape.BOOL_OR_VALUE
    else:
        shape = Shape.VALUE
    return ConfigKey(shape=shape, sections=sections, field=field)


def _is_section(member: object) -> bool:
    return isinstance(member, type) and issubclass(member, Section)
