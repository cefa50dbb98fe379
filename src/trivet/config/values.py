"""The values of all sources of a configuration, laid over each other, each with its origin.

It knows the keys' types, to decode text and to find lists, and validates nothing: `config.load` does that for all values together.
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
    """One value of one source."""

    path: KeyPath
    value: object
    origin: str
    """The source in the user's words: a file, a flag, a variable."""


class Text(str):
    """A value that was typed as text whatever its type, and is still to be decoded."""

    __slots__ = ()


def flatten(entry: Entry) -> Iterator[Entry]:
    """Yield an entry for each value in the tables of `entry`, with its whole path."""
    if table := as_table(entry.value):
        for name, item in table.items():
            yield from flatten(replace(entry, path=(*entry.path, name), value=item))
    elif entry.path:
        yield entry


class Values:
    """The values of all sources by their whole path, later over earlier. What it does not hold has its default.

    A section that was set to null hides the values below it, until a later one below it brings them back.
    """

    def __init__(self, kind: type[Section]) -> None:
        self._kind = kind
        self._entries: dict[KeyPath, Entry] = {}
        self._tables: set[KeyPath] = set()
        """Paths of the tables and lists of tables that hold or held a value."""
        self._lengths: dict[KeyPath, int] = {}
        """Number of entries in each list of sections."""
        self._derived: set[KeyPath] = set()

    def add(self, entry: Entry) -> None:
        """Lay the value of `entry` over what is there; raise ValueError if it cannot be decoded or has no place in its list."""
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
        """Set a dotted key to a value that another key determines, unless its section is null or no table."""
        path = tuple(key.split("."))
        if all(self._entries[path[:end]].value == {} for end in range(1, len(path)) if path[:end] in self._entries):
            self._set(Entry(path=path, value=value, origin=origin))
            self._derived.add(path)

    def find(self, key: str | KeyPath) -> object:
        """Return the value of a key, a dictionary with the names in a table, or `UNSET`."""
        path = tuple(key.split(".")) if isinstance(key, str) else key
        if self._is_hidden(path):
            return UNSET
        for end in range(len(path), 0, -1):
            found = self._entries.get(path[:end])
            if found is not None and (end == len(path) or as_list(found.value)):  # inside a list, the list stands for its entry
                return found.value
        return {found[len(path)]: None for found in self._below(path)} or UNSET

    def has_value(self, key: str) -> bool:
        """Return whether a dotted key is set, to null for one; a table is no value."""
        found = self.find(key)
        return found is not UNSET and not isinstance(found, dict)

    def is_null(self, key: str) -> bool:
        """Return whether the section `key`, or one that holds it, was set to null."""
        return self._is_hidden((*key.split("."), ""))

    def is_derived(self, path: KeyPath) -> bool:
        """Return whether a value is a copy of another key's. What is wrong with it is reported once, at that key."""
        while path and isinstance(path[-1], int):  # an element of a list that was copied
            path = path[:-1]
        return path in self._derived

    def origin(self, path: KeyPath) -> str:
        """Return the origin of a value; of a table that of its first value, of an unset key that of what is around it."""
        below = next((self._entries[inner].origin for inner in self._below(path)), None)
        around = (self._entries[path[:end]].origin for end in range(len(path), 0, -1) if path[:end] in self._entries)
        return below or next(around, "default")

    def origins(self) -> dict[str, str]:
        """Return the origin of every value, by dotted key."""
        return {dotted(entry.path): entry.origin for entry in self.entries() if entry.value != {}}

    def entries(self) -> list[Entry]:
        """Return everything that is set and not hidden."""
        return [entry for path, entry in self._entries.items() if not self._is_hidden(path)]

    def remove(self, path: KeyPath) -> None:
        """Forget one value."""
        del self._entries[path]

    def tree(self) -> dict[str | int, object]:
        """Return everything that is set as nested tables and lists."""
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
        return any((above := self._entries.get(path[:end])) is not None and above.value is None for end in range(1, len(path)))

    def _below(self, path: KeyPath) -> list[KeyPath]:
        return [inner for inner in self._entries if inner[: len(path)] == path != inner] if path in self._tables else []

    def _set(self, entry: Entry) -> None:
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
        """Return the path with the index of its list of sections: the one that is typed, or 0 for the only entry."""
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
    """Return `value` with null for the text "None", in lists of tables too."""
    if (table := as_table(value)) is not None:
        return {name: _with_nulls(item) for name, item in table.items()}
    if (items := as_list(value)) and all(isinstance(item, dict) for item in items):
        return [_with_nulls(item) for item in items]
    return None if value == "None" else value


def _decode(key: ConfigKey, text: str) -> object:
    """Return the text of a flag or variable as a value for `key`; a scalar stays text, which validation converts."""
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
