"""Reads files, flags and the environment, each into a layer. pydantic-settings merges the layers.

A layer is a tree of values with their origins. Reading knows the keys' types (to decode text, to find lists) but
validates nothing: that is one step for all layers together, in config.load.
"""

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from trivet.config.arguments import FlagArgument
from trivet.config.findings import Findings
from trivet.config.keys import ConfigKey, Shape, find_key
from trivet.config.layout import OWN_VARIABLES
from trivet.config.origins import Draft, Node, Tree, annotate
from trivet.config.schema.base import Section
from trivet.config.tables import as_list, as_table
from trivet.config.user_input import MAX_DEPTH, parse_json, read_toml_file, require_limits, usable_path
from trivet.errors import ConfigError
from trivet.shown_text import shorten

ENVIRONMENT_PREFIX = "TRIVET_"
INHERIT_KEY = "toml_files"
_MAX_INHERITED = 16
"""Files that inherit from each other; doubling lists of such files would otherwise take hours to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One value of one source, before spelling and type are known to be right."""

    path: tuple[str, ...]
    value: object
    origin: str


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


def read_flags(flags: Sequence[FlagArgument]) -> list[Entry]:
    """Return entries of flags, in their order."""
    return [
        Entry(
            path=flag.path,
            value=Text(flag.value) if isinstance(flag.value, str) else flag.value,
            origin=f"flag {shorten(flag.name)}",
        )
        for flag in flags
    ]


class Text(str):
    """A value that was typed as text whatever its type, and is still to be decoded."""

    __slots__ = ()


def build_layer(kind: type[Section], entries: Sequence[Entry], findings: Findings, *, below: Sequence[Tree]) -> Tree:
    """Decode `entries` into one tree. An entry that reaches into a list of sections edits the list of the layers below.

    Args:
        below: the layers that this one will be laid over, lowest first.
    """
    tree: Tree = {}
    for entry in entries:
        if problem := _path_problem(entry.path):
            findings.refuse(f"{shorten('.'.join(entry.path))}: {problem} ({entry.origin})")
            continue
        try:
            key = find_key(kind, entry.path)
            value = decode(key, entry.value) if isinstance(entry.value, Text) and key else entry.value
            for part in flatten(replace(entry, value=value)):
                _insert(kind, tree, part, below=below)
        except ValueError as exc:
            findings.refuse(f"{shorten('.'.join(entry.path))}: {exc} ({entry.origin})")
    return tree


def _path_problem(path: Sequence[str]) -> str | None:
    if len(path) > MAX_DEPTH:
        return f"a key has at most {MAX_DEPTH} parts"
    try:
        ".".join(path).encode()
    except UnicodeEncodeError:
        return "a key must be text in UTF-8"
    return None


class _Layers(BaseSettings):
    """The layers laid over each other by pydantic-settings: the values that it was made with, later over earlier."""

    model_config = SettingsConfigDict(extra="allow", protected_namespaces=())

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **_others: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        layers: list[Tree] = init_settings()["layers"]
        return tuple(InitSettingsSource(settings_cls, init_kwargs=dict(layer)) for layer in reversed(layers))


def merge_layers(layers: Sequence[Tree]) -> Tree:
    """Lay each layer over those before it: tables are merged key by key, anything else is replaced."""
    make = cast("Callable[..., _Layers]", _Layers)  # it has no field `layers`, which would hide a key of that name
    return dict(make(layers=list(layers)).model_extra or {})


def decode(key: ConfigKey, text: str) -> object:
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
    if key.shape is Shape.VALUE:
        return str(text) if key.field else _json_or_text(text)
    try:
        return _read_limited(text)
    except json.JSONDecodeError as exc:
        raise ValueError(f"must be JSON on a command line, or set key by key, and is not: {exc}") from exc


def _json_or_text(text: str) -> object:
    try:
        return _read_limited(text)
    except json.JSONDecodeError:
        return str(text)


def _read_limited(text: str) -> object:
    value = parse_json(text)
    require_limits(value)
    return value


def flatten(entry: Entry) -> Iterator[Entry]:
    """Yield an entry for each value in the tables of `entry`, with its whole path."""
    if table := as_table(entry.value):
        for name, item in table.items():
            yield from flatten(Entry(path=(*entry.path, name), value=item, origin=entry.origin))
    elif entry.path:
        yield entry


def _insert(kind: type[Section], tree: Tree, entry: Entry, *, below: Sequence[Tree]) -> None:
    table, at = tree, 0
    *parents, last = entry.path
    while at < len(parents):
        here = entry.path[: at + 1]
        key = find_key(kind, here)
        if key and key.shape is Shape.SECTION_LIST:
            items = _editable_list(key, table, here, below=below)
            index = entry.path[at + 1]
            at += 2 if index.isdecimal() else 1
            table = _element(items, index, name=".".join(here))
            continue
        inner = table.get(parents[at])
        if not isinstance(inner, dict):
            inner = table[parents[at]] = {}
        table, at = inner, at + 1
    if at > len(parents):
        raise ValueError("names an element; set one of its keys")
    if entry.value == {}:
        if not isinstance(table.get(last), dict):
            table[last] = {}
    else:
        table[last] = annotate(entry.value, entry.origin)


def _editable_list(key: ConfigKey, table: Tree, path: tuple[str, ...], *, below: Sequence[Tree]) -> list[Node]:
    present = table.get(path[-1])
    if not isinstance(present, list):
        lower = next((node for layer in reversed(below) if (node := Draft(layer).find(".".join(path))) is not None), None)
        default = as_list(key.field.get_default(call_default_factory=True)) if key.field else None
        present = copy.deepcopy(lower) if isinstance(lower, list) else cast("list[Node]", [{} for _ in default or ()])
        table[path[-1]] = present
    return present


def _element(items: list[Node], index: str, *, name: str) -> Tree:
    if not index.isdecimal():
        if len(items) > 1:
            raise ValueError(f"{name} has {len(items)} entries; say which, e.g. {name}.0.{index}")
        index = "0"
    if int(index) > len(items):
        raise ValueError(f"{name} has {len(items)} entries; the next index is {len(items)}")
    if int(index) == len(items):
        items.append({})
    element = items[int(index)]
    if not isinstance(element, dict):
        raise ValueError(f"entry {index} of {name} is no table")
    return element
