"""Reads files and variables as entries, and lays entries over each other.

An entry is one value of one source. Reading knows the keys' types (to decode text, to find lists) but validates nothing: that is
one step for all sources together, in `config.load`.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from trivet.config.keys import ConfigKey, KeyPath, Shape, dotted, find_key
from trivet.config.layout import OWN_VARIABLES
from trivet.config.schema.base import Section
from trivet.config.tables import as_list, as_table
from trivet.config.user_input import MAX_DEPTH, parse_json, read_toml_file, require_limits, usable_path
from trivet.errors import ConfigError
from trivet.shown_text import shorten

ENVIRONMENT_PREFIX = "TRIVET_"
INHERIT_KEY = "toml_files"
UNSET = object()
"""Stands for the value of a key that no source sets."""
_MAX_INHERITED = 16
"""Files that inherit from each other; doubling lists of such files would otherwise take hours to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One value of one source, before spelling and type are known to be right."""

    path: tuple[str, ...]
    value: object
    origin: str
    """The source in the user's words: a file, a flag, a variable."""


class Text(str):
    """A value that was typed as text whatever its type, and is still to be decoded."""

    __slots__ = ()


def read_toml(path: Path, *, under: tuple[str, ...] = (), _readers: tuple[Path, ...] = ()) -> list[Entry]:
    """Return the tables of `path` and of the files that it inherits from, in order of rising precedence.

    Args:
        under: the section that the files fill.

    Raises:
        ConfigError: a file is missing, is not TOML, or inherits from itself; names file and line.
    """
    resolved = usable_path(path, key=INHERIT_KEY if _readers else "@").resolve()
    if resolved in _readers:
        raise ConfigError(f"{path} inherits from itself through {INHERIT_KEY}: {' -> '.join(str(p) for p in _readers)}")
    try:
        content = read_toml_file(path)
    except OSError as exc:
        heir = f" ({INHERIT_KEY} of {_readers[-1]} names it, counted from that file's folder)" if _readers else ""
        raise ConfigError(f"{path} cannot be read: {exc.strerror}{heir}") from exc
    except ValueError as exc:
        raise ConfigError(f"{path} is not valid TOML: {exc}") from exc
    spellings = [name for name in content if name.replace("-", "_") == INHERIT_KEY]
    if len(spellings) > 1:
        raise ConfigError(f"{' and '.join(spellings)} are two spellings of one key ({path}); remove one")
    bases: object = content.pop(spellings[0]) if spellings else []
    names = [base for base in as_list(bases) or [] if isinstance(base, str)]
    if len(_readers) >= _MAX_INHERITED:
        raise ConfigError(f"{path} inherits through more than {_MAX_INHERITED} files; {INHERIT_KEY} is nested too deep")
    if names != bases:
        raise ConfigError(f'{INHERIT_KEY} in {path} must be a list of file names, e.g. {INHERIT_KEY} = ["base.toml"]')
    inherited = [
        entry for base in names for entry in read_toml(path.parent / base, under=under, _readers=(*_readers, resolved))
    ]
    return [*inherited, Entry(path=under, value=content, origin=str(path))]


def read_environment(environ: Mapping[str, str]) -> list[Entry]:
    """Return entries of the variables with our prefix: `TRIVET_A__B=value` sets `a.b`."""
    return [
        Entry(
            path=tuple(name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")),
            value=Text(text),
            origin=f"variable {shorten(name)}",
        )
        for name, text in sorted(environ.items())
        if name.startswith(ENVIRONMENT_PREFIX) and name not in OWN_VARIABLES
    ]


def flatten(entry: Entry) -> Iterator[Entry]:
    """Yield an entry for each value in the tables of `entry`, with its whole path."""
    if table := as_table(entry.value):
        for name, item in table.items():
            yield from flatten(replace(entry, path=(*entry.path, name), value=item))
    elif entry.path:
        yield entry


class Values:
    """The values of all sources laid over each other, later over earlier. What it does not hold has its default.

    The origin of a value is the last source that set it, or that set the table or list around it.
    """

    def __init__(self, kind: type[Section]) -> None:
        self.tree: dict[str, object] = {}
        self._kind = kind
        self._origins: dict[KeyPath, str] = {}
        self._derived: set[str] = set()
        self._nulled: dict[KeyPath, dict[str, object]] = {}
        """Tables that were replaced by null. A later key below one of them brings it back."""

    def add(self, entry: Entry) -> None:
        """Lay the value of `entry` over what is there. An entry may reach into a list of sections.

        Raises:
            ValueError: the text of a flag or variable cannot be decoded, or there is no such place in a list.
        """
        if len(entry.path) > MAX_DEPTH:
            raise ValueError(f"a key has at most {MAX_DEPTH} parts")
        try:
            ".".join(entry.path).encode()
        except UnicodeEncodeError:
            raise ValueError("a key must be text in UTF-8") from None
        key = find_key(self._kind, entry.path)
        value = _decode(key, entry.value) if isinstance(entry.value, Text) and key else entry.value
        for part in flatten(replace(entry, value=value)):
            table, path = self._enter(part.path)
            self._set(table, path, part.value, part.origin)

    def derive(self, key: str, value: object, origin: str) -> None:
        """Set a dotted key to a value that another key determines."""
        *parents, last = key.split(".")
        table = self.tree
        for part in parents:
            inner = table.setdefault(part, {})
            if not isinstance(inner, dict):
                return  # not a table: validation will say so, or it is null on purpose
            table = cast("dict[str, object]", inner)
        self._set(table, (*parents, last), value, origin)
        self._derived.add(key)

    def find(self, key: str) -> object:
        """Return what stands at a dotted key: a value, a table or a list; `UNSET` for nothing."""
        node: object = self.tree
        for part in key.split("."):
            if (table := as_table(node)) is not None:
                node = table.get(part, UNSET)
            elif (items := as_list(node)) is not None and part.isdecimal() and int(part) < len(items):
                node = items[int(part)]
            else:
                return UNSET
        return node

    def has_value(self, key: str) -> bool:
        """Return whether a dotted key is set, to null for one; a table is no value."""
        return not isinstance(self.find(key), dict) and self.find(key) is not UNSET

    def is_null(self, key: str) -> bool:
        """Return whether the section `key`, or one that holds it, was set to null."""
        parts = key.split(".")
        return any(self.find(".".join(parts[: end + 1])) is None for end in range(len(parts)))

    def is_derived(self, path: KeyPath) -> bool:
        """Return whether a value is a copy of another key's. What is wrong with it is said once, at that key."""
        parts = list(path)
        while parts and isinstance(parts[-1], int):  # an element of a list that was copied
            parts.pop()
        return dotted(tuple(parts)) in self._derived

    def origin(self, path: KeyPath) -> str:
        """Return the origin of a value; of a table that of its first value."""
        if path in self._origins and not isinstance(self.find(dotted(path)), dict):
            return self._origins[path]
        within = (origin for inner, origin in self._origins.items() if inner[: len(path)] == path)
        around = (self._origins[path[:end]] for end in range(len(path), 0, -1) if path[:end] in self._origins)
        return next(within, None) or next(around, "default")

    def origins(self) -> dict[str, str]:
        """Return the origin of every value, by dotted key."""
        return {dotted(path): self.origin(path) for path in _leaves(self.tree)}

    def _enter(self, path: tuple[str, ...]) -> tuple[dict[str, object], KeyPath]:
        """Return the table of the key at `path`, made if need be, and the path with the index of each list."""
        table, here = self.tree, KeyPath()
        parts = list(path)
        while len(parts) > 1:
            name = parts.pop(0)
            here = (*here, name)
            key = find_key(self._kind, here)
            if key is None or key.shape is not Shape.SECTION_LIST:
                inner = table.get(name)
                if not isinstance(inner, dict):
                    inner = table[name] = self._nulled.pop(here, {})
                table = cast("dict[str, object]", inner)
                continue
            default = key.field.get_default(call_default_factory=True) if key.field else None
            present = as_list(table.get(name))
            items: list[object] = [{} for _ in as_list(default) or ()] if present is None else present
            table[name] = items
            if not parts[0].isdecimal() and len(items) > 1:
                raise ValueError(f"{dotted(here)} has {len(items)} entries; say which, e.g. {dotted(here)}.0.{parts[0]}")
            index = int(parts.pop(0)) if parts[0].isdecimal() else 0
            if index > len(items):
                raise ValueError(f"{dotted(here)} has {len(items)} entries; the next index is {len(items)}")
            if not parts:
                raise ValueError("names an element; set one of its keys")
            items.extend([{}] if index == len(items) else [])
            element = as_table(items[index])
            if element is None:
                raise ValueError(f"entry {index} of {dotted(here)} is no table")
            table, here = element, (*here, index)
        return table, (*here, parts[0])

    def _set(self, table: dict[str, object], path: KeyPath, value: object, origin: str) -> None:
        name = str(path[-1])
        before = as_table(table.get(name))
        if value == {}:
            table[name] = self._nulled.pop(path, {}) if before is None else before
        else:
            table[name] = _with_nulls(value)
            if table[name] is None and before is not None:
                self._nulled[path] = before
            elif isinstance(value, list):
                self._origins = {inner: known for inner, known in self._origins.items() if inner[: len(path)] != path}
        self._origins[path] = origin


def _with_nulls(value: object) -> object:
    """Return a copy of `value` in which the text "None" is null, in lists of tables too."""
    if (table := as_table(value)) is not None:
        return {name: _with_nulls(item) for name, item in table.items()}
    if (items := as_list(value)) and all(isinstance(item, dict) for item in items):
        return [_with_nulls(item) for item in items]
    return None if value == "None" else value


def _leaves(node: object, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the path of every value; an empty table has none."""
    if (table := as_table(node)) is not None:
        for name, item in table.items():
            yield from _leaves(item, (*path, name))
    elif (items := as_list(node)) and all(isinstance(item, dict) for item in items):
        for index, item in enumerate(items):
            yield from _leaves(item, (*path, index))
    else:
        yield path


def _decode(key: ConfigKey, text: str) -> object:
    """Return the text of a flag or variable as a value for `key`; a scalar stays text, which validation converts.

    Raises:
        ValueError: the text is no JSON where only JSON can say what is meant.
    """
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
