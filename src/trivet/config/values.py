"""Lays the values of all sources of a configuration over each other, each with its origin.

The types of the keys are used here to decode text and to find lists. Nothing is validated: `config.load` validates all values
together.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace

from trivet.config.keys import ConfigKey, KeyPath, Shape, dotted, find_key
from trivet.config.schema.base import Section
from trivet.config.tables import as_list, as_table
from trivet.config.user_input import MAX_DEPTH, parse_json, require_limits

UNSET = object()
"""Stands for the value of a key that no source sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A key of the configuration with the value that one source gives it."""

    path: KeyPath
    value: object
    origin: str
    """The source, as text for the user: a file, a flag, a variable."""


class Text(str):
    """A value of a flag or an environment variable: text of any type, which still has to be decoded."""

    __slots__ = ()


def flatten(entry: Entry) -> Iterator[Entry]:
    """Yield an entry, with its whole path, for each value in the tables of `entry`."""
    if table := as_table(entry.value):
        for name, item in table.items():
            yield from flatten(replace(entry, path=(*entry.path, name), value=item))
    elif entry.path:
        yield entry


class Values:
    """The values of all sources by their whole path. A later value replaces an earlier one; a key without a value has its default.

    A section that is set to null hides the values below it. A later value below the section shows them again.
    """

    def __init__(self, kind: type[Section]) -> None:
        self._kind = kind
        self._entries: dict[KeyPath, Entry] = {}
        self._tables: set[KeyPath] = set()
        """Paths of the tables and lists of tables in which a value is or was set."""
        self._lengths: dict[KeyPath, int] = {}
        """Number of entries in each list of sections."""
        self._derived: set[KeyPath] = set()
        """Paths of the values that were set by `derive`."""

    def add(self, entry: Entry) -> None:
        """Set the value of `entry`. Raise ValueError if it cannot be decoded, or if its list has no entry with this index."""
        if len(entry.path) > MAX_DEPTH:
            raise ValueError(f"a key has at most {MAX_DEPTH} parts")
        try:
            dotted(entry.path).encode()
        except UnicodeEncodeError:
            raise ValueError("a key must be text in UTF-8") from None
        key = find_key(self._kind, entry.path)
        value = _decode(key, entry.value) if isinstance(entry.value, Text) and key else entry.value
        for part in flatten(replace(entry, value=value)):
            self._set(replace(part, path=self._with_index(part.path)))

    def derive(self, key: str, value: object, origin: str) -> None:
        """Set a dotted key to a value that another key determines. Does nothing if its section was set to null or to no table."""
        path = tuple(key.split("."))
        if all(self._entries[path[:end]].value == {} for end in range(1, len(path)) if path[:end] in self._entries):
            self._set(Entry(path=path, value=value, origin=origin))
            self._derived.add(path)

    def find(self, key: str | KeyPath) -> object:
        """Return the value of a key, or `UNSET`. For a table this is a dictionary with the names in it, whose values are None."""
        path = tuple(key.split(".")) if isinstance(key, str) else key
        if self._is_hidden(path):
            return UNSET
        for end in range(len(path), 0, -1):
            found = self._entries.get(path[:end])
            if found is not None and (end == len(path) or as_list(found.value)):  # a path into a list gets the whole list
                return found.value
        return {found[len(path)]: None for found in self._below(path)} or UNSET

    def has_value(self, key: str) -> bool:
        """Return whether a dotted key has a value. Null is a value, a table is none."""
        found = self.find(key)
        return found is not UNSET and not isinstance(found, dict)

    def is_null(self, key: str) -> bool:
        """Return whether the section `key`, or one that holds it, was set to null."""
        return self._is_hidden((*key.split("."), ""))

    def is_derived(self, path: KeyPath) -> bool:
        """Return whether a value was set by `derive`. A wrong value is then reported once, at the key that it was derived from."""
        while path and isinstance(path[-1], int):  # an element of a derived list
            path = path[:-1]
        return path in self._derived

    def origin(self, path: KeyPath) -> str:
        """Return the origin of a value. A table has the origin of its first value, an unset key that of the section around it."""
        below = next((self._entries[inner].origin for inner in self._below(path)), None)
        around = (self._entries[path[:end]].origin for end in range(len(path), 0, -1) if path[:end] in self._entries)
        return below or next(around, "default")

    def origins(self) -> dict[str, str]:
        """Return the origin of every value, by dotted key."""
        return {dotted(entry.path): entry.origin for entry in self.entries() if entry.value != {}}

    def entries(self) -> list[Entry]:
        """Return all entries that are set and not hidden by a section that is null."""
        return [entry for path, entry in self._entries.items() if not self._is_hidden(path)]

    def remove(self, path: KeyPath) -> None:
        """Forget one value."""
        del self._entries[path]

    def tree(self) -> dict[str | int, object]:
        """Return all values that are set, as nested tables and lists."""
        tables: dict[KeyPath, dict[str | int, object]] = {(): {}}

        def table_at(path: KeyPath) -> dict[str | int, object]:
            if path not in tables:
                tables[path] = {}
                table_at(path[:-1])[path[-1]] = tables[path]
            return tables[path]

        for entry in self.entries():
            if entry.value == {}:
                table_at(entry.path)
            else:
                table_at(entry.path[:-1])[entry.path[-1]] = entry.value
        for path, length in self._lengths.items():
            if path in tables:
                table_at(path[:-1])[path[-1]] = [table_at((*path, index)) for index in range(length)]
        return tables[()]

    def _is_hidden(self, path: KeyPath) -> bool:
        """Return whether a section above `path` is set to null."""
        return any((above := self._entries.get(path[:end])) is not None and above.value is None for end in range(1, len(path)))

    def _below(self, path: KeyPath) -> list[KeyPath]:
        """Return the paths of all values that are set inside the table `path`."""
        return [inner for inner in self._entries if inner[: len(path)] == path != inner] if path in self._tables else []

    def _set(self, entry: Entry) -> None:
        """Store one entry. It replaces values of the sections above it and, unless it is null, all values below it."""
        path, value = entry.path, _with_nulls(entry.value)
        for end in range(1, len(path)):
            self._entries.pop(path[:end], None)
            self._tables.add(path[:end])
        if value == {} and self._below(path):
            self._entries.pop(path, None)
            return
        if value is not None:
            for inner in self._below(path):
                del self._entries[inner]
            self._lengths.pop(path, None)
        key, items = find_key(self._kind, path), as_list(value)
        if items is None or key is None or key.shape is not Shape.SECTION_LIST or any(as_table(item) is None for item in items):
            items = []
        else:
            self._lengths[path] = len(items)
        if items:
            self._entries.pop(path, None)
            for index, item in enumerate(items):
                for part in flatten(replace(entry, path=(*path, index), value=item)):
                    self._set(part)
        else:
            self._entries[path] = replace(entry, value=value)

    def _with_index(self, path: KeyPath) -> KeyPath:
        """Return `path` with the index of its list of sections as a number. Without an index it is 0, if the list has one entry."""
        for end in range(1, len(path)):
            here, rest = path[:end], path[end:]
            key = find_key(self._kind, here)
            if key is None or key.shape is not Shape.SECTION_LIST:
                continue
            default = key.field.get_default(call_default_factory=True) if key.field else None
            length = self._lengths.get(here, len(as_list(default) or ()))
            index, inner = (int(rest[0]), rest[1:]) if str(rest[0]).isdecimal() else (0, rest)
            if inner is rest and length > 1:
                raise ValueError(f"{dotted(here)} has {length} entries; say which, e.g. {dotted(here)}.0.{rest[0]}")
            if index > length:
                raise ValueError(f"{dotted(here)} has {length} entries; the next index is {length}")
            if not inner:
                raise ValueError("names an element; set one of its keys")
            self._lengths[here] = max(length, index + 1)
            return (*here, index, *inner)
        return path


def _with_nulls(value: object) -> object:
    """Return `value` with null in place of the text "None", also inside tables and lists of tables."""
    if (table := as_table(value)) is not None:
        return {name: _with_nulls(item) for name, item in table.items()}
    if (items := as_list(value)) and all(isinstance(item, dict) for item in items):
        return [_with_nulls(item) for item in items]
    return None if value == "None" else value


def _decode(key: ConfigKey, text: str) -> object:
    """Decode the text of a flag or variable for `key`. A scalar stays text, because validation converts it."""
    if text == "None" or key.shape is Shape.BOOL:
        return str(text)
    if key.shape is Shape.BOOL_OR_VALUE:
        return {"true": True, "false": False}.get(text.lower(), text)
    if key.shape is Shape.LIST and not text.startswith("["):
        return [item.strip() for item in text.split(",") if item.strip()]
    if key.shape is Shape.VALUE and key.field:
        return str(text)
    try:
        value = parse_json(text)
        require_limits(value)
    except json.JSONDecodeError as exc:
        if key.shape is Shape.VALUE:
            return str(text)
        raise ValueError(f"must be JSON on a command line, or set key by key, and is not: {exc}") from exc
    return value
