"""Accepts keys of TOML files that are written like flags, `micro-batch-size = 8`.

Called by `config.loading.load` for each source, before `config.loading.spellings`.

Names that are the user's own, such as an environment's arguments, stay as they are.
"""

from collections.abc import Sequence

from trivet.config.loading.findings import Findings
from trivet.config.loading.keys import Shape, find_key
from trivet.config.loading.sources import Entry
from trivet.config.loading.spellings import current_path
from trivet.config.sections.base import Section
from trivet.config.tables import as_list, as_table

_Path = tuple[str, ...]


def replace_dashes(kind: type[Section], entries: Sequence[Entry], findings: Findings) -> list[Entry]:
    """Return `entries` of one source with underscores in their keys; a key in both spellings is refused, naming both."""
    seen: dict[_Path, str] = {}
    return [
        Entry(
            path=(path := _spell_path(kind, entry.path, entry.origin, seen, findings)),
            value=_spell_value(kind, entry.value, path, entry.origin, findings),
            origin=entry.origin,
        )
        for entry in entries
    ]


def _spell_path(kind: type[Section], typed: _Path, origin: str, seen: dict[_Path, str], findings: Findings) -> _Path:
    """Return `typed` with underscores.

    Args:
        seen: how the last part of each path was typed so far in this source, by the path with underscores. Gets new ones.
    """
    path: _Path = ()
    for name in typed:
        parent, path = path, (*path, _spell_name(kind, path, name))
        _note_spelling(path, name, parent, origin, seen, findings)
    return path


def _note_spelling(path: _Path, name: str, parent: _Path, origin: str, seen: dict[_Path, str], findings: Findings) -> None:
    """Refuse `name` if the same key was typed in another spelling before."""
    other = seen.get(path, name)
    if other != name:
        names = " and ".join(".".join((*parent, each)) for each in sorted((other, name)))
        findings.refuse(f"{names} are two spellings of one key ({origin}); remove one")
    seen[path] = name


def _spell_value(kind: type[Section], value: object, path: _Path, origin: str, findings: Findings) -> object:
    """Return `value` with underscores in the keys of the tables that it holds, if it is a list of sections."""
    current = find_key(kind, current_path(kind, path))
    items = as_list(value)
    if items is None or current is None or current.shape is not Shape.SECTION_LIST:
        return value
    return [_spell_table(kind, item, (*path, str(index)), origin, findings) for index, item in enumerate(items)]


def _spell_table(kind: type[Section], value: object, path: _Path, origin: str, findings: Findings) -> object:
    table = as_table(value)
    if table is None:
        return _spell_value(kind, value, path, origin, findings)
    seen: dict[_Path, str] = {}
    spelled: dict[str, object] = {}
    for name, item in table.items():
        (*_, key) = here = (*path, _spell_name(kind, path, name))
        _note_spelling(here, name, path, origin, seen, findings)
        spelled[key] = _spell_table(kind, item, here, origin, findings)
    return spelled


def _spell_name(kind: type[Section], parent: _Path, name: str) -> str:
    """Return `name` with underscores, unless it is a name of the user's own below a free table."""
    spelled = name.replace("-", "_")
    if spelled == name:
        return name
    path = current_path(kind, (*parent, spelled))
    is_free = any((key := find_key(kind, path[:length])) and key.shape is Shape.TABLE for length in range(len(path)))
    return name if is_free else spelled
