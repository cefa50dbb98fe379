"""Accepts keys of TOML files that are written like flags, `micro-batch-size = 8`.

Called by `config.load` for each file, before `config.spellings`.

Names that are the user's own, such as an environment's arguments, stay as they are.
"""

from dataclasses import replace

from trivet.config.findings import Findings
from trivet.config.keys import Shape, find_key
from trivet.config.schema.base import Section
from trivet.config.sources import Entry
from trivet.config.spellings import current_path
from trivet.config.tables import as_list, as_table

_Path = tuple[str, ...]


def replace_dashes(kind: type[Section], entry: Entry, findings: Findings) -> Entry:
    """Return a file's entry with underscores in its keys; a key in both spellings is refused, naming both."""
    return replace(entry, value=_spell(kind, entry.value, entry.path, entry.origin, findings))


def _spell(kind: type[Section], value: object, path: _Path, origin: str, findings: Findings) -> object:
    """Return `value` with underscores in the keys of the tables in it."""
    if (table := as_table(value)) is not None:
        return _spell_table(kind, table, path, origin, findings)
    key = find_key(kind, current_path(kind, path))
    items = as_list(value)
    if items is None or key is None or key.shape is not Shape.SECTION_LIST:
        return value
    return [_spell(kind, item, (*path, str(index)), origin, findings) for index, item in enumerate(items)]


def _spell_table(
    kind: type[Section], table: dict[str, object], path: _Path, origin: str, findings: Findings
) -> dict[str, object]:
    typed: dict[str, str] = {}
    spelled: dict[str, object] = {}
    for name, item in table.items():
        key = _spell_name(kind, path, name)
        other = typed.setdefault(key, name)
        if other != name:
            names = " and ".join(".".join((*path, each)) for each in sorted((other, name)))
            findings.refuse(f"{names} are two spellings of one key ({origin}); remove one")
        spelled[key] = _spell(kind, item, (*path, key), origin, findings)
    return spelled


def _spell_name(kind: type[Section], parent: _Path, name: str) -> str:
    """Return `name` with underscores, unless it is a name of the user's own below a free table."""
    spelled = name.replace("-", "_")
    if spelled == name:
        return name
    path = current_path(kind, (*parent, spelled))
    is_free = any((key := find_key(kind, path[:length])) and key.shape is Shape.TABLE for length in range(len(path)))
    return name if is_free else spelled
