"""Finds keys in a configuration model: which key stands at a path, and which one a misspelled path was meant to be."""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import get_args, get_origin

from pydantic.fields import FieldInfo

from trivet.config.schema.base import Section, members

KeyPath = tuple[str | int, ...]

_ALIKE = 0.7
"""Likeness of two names that are taken for one: `max_step` and `max_steps` have 0.94, `reward` and `wandb` 0.55."""
_MAX_NAME_CHARS = 100
"""Longer names are not compared: it would take seconds, and no key is so long."""


class Shape(StrEnum):
    """The kinds of value that a key can have."""

    SECTION = "section"
    SECTION_LIST = "section_list"
    TABLE = "table"
    """Names of the user's own choice, such as an environment's arguments."""
    LIST = "list"
    BOOL = "bool"
    BOOL_OR_VALUE = "bool_or_value"
    """A flag that may stand alone, and may name something."""
    VALUE = "value"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigKey:
    """A key of a configuration model."""

    shape: Shape
    sections: tuple[type[Section], ...] = ()
    """Models of a section or of a list of them; several when a `type` key chooses."""
    field: FieldInfo | None = None
    """The field of its model; None for the root, an element of a list and a name inside a table."""


def dotted(path: KeyPath) -> str:
    """Return a path as the user writes it: `a.0.b`."""
    return ".".join(map(str, path))


@lru_cache(maxsize=4096)
def find_key(kind: type[Section], path: KeyPath) -> ConfigKey | None:
    """Return the key that `kind` has at `path`, or None. A list of sections may be entered with or without an index."""
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
    """Yield every key of `kind`, sections before what they hold, in the order of the models."""
    for name, field in kind.model_fields.items():
        key = key_of(field)
        yield (*prefix, name), key
        for section in key.sections:
            yield from all_keys(section, (*prefix, name))


def nearest_key(kind: type[Section], path: KeyPath) -> str | None:
    """Return the existing key that was most likely meant by the unknown `path`: a sibling, or one of its name elsewhere.

    None if no key is like it: a guess that is far off misleads more than the list of keys.
    """
    if any(len(str(part)) > _MAX_NAME_CHARS for part in path):
        return None
    known = next(length for length in range(len(path)) if find_key(kind, path[: length + 1]) is None)
    parent, name, last = path[:known], str(path[known]), str(path[-1])
    key = find_key(kind, parent)
    siblings = [sibling for section in (key.sections if key else ()) for sibling in section.model_fields]
    closest = max(siblings, key=lambda sibling: _likeness(sibling, name), default="")
    if _likeness(closest, name) >= _ALIKE:
        return dotted((*parent, closest))
    everywhere = _all_keys_of(kind)
    same = [candidate for candidate in everywhere if candidate[-1] == last]
    alike = same or [candidate for candidate in everywhere if _likeness(str(candidate[-1]), last) >= _ALIKE]
    is_unmistakable = len(same) == 1
    close = difflib.get_close_matches(dotted(path), map(dotted, alike), n=1, cutoff=0.0 if is_unmistakable else 0.6)
    return close[0] if close else None


@lru_cache
def _all_keys_of(kind: type[Section]) -> list[KeyPath]:
    return list(dict.fromkeys(path for path, _ in all_keys(kind)))  # sections of several types share keys


def _likeness(known: str, typed: str) -> float:
    """Return a likeness from 0 to 1. A name's initials count as the name: `lr` for `learning_rate`."""
    if known == "".join(word[:1] for word in typed.split("_")):
        return 1.0
    return difflib.SequenceMatcher(None, known, typed).ratio()


def key_of(field: FieldInfo) -> ConfigKey:
    """Return the key that a field of a model is."""
    choices = [member for member in members(field.annotation) if member is not type(None)]
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
