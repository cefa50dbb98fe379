"""Writes a configuration as TOML that loads to the same configuration, plain for roles or with origins for people."""

import re
from collections.abc import Callable, Iterator, Mapping

import tomli_w

from trivet.config.keys import KeyPath, dotted
from trivet.config.masking import mask
from trivet.config.schema.base import Section
from trivet.config.tables import as_list, as_table

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(
    config: Section, *, origins: Mapping[str, str] | None = None, is_masked: bool = False, omits_defaults: bool = False
) -> str:
    """Return every key of `config`. A null is left out if it is the key's default, and else written as the text "None".

    Args:
        origins: the origin of each value, by dotted key. If given, each line ends with a comment that names the origin.
        is_masked: True hides secrets, for display. No role can start from such a text.
        omits_defaults: True leaves out keys that have their defaults.
    """

    def format_line(name: str, value: object, path: KeyPath) -> str:
        written = f"{toml_key(name)} = {literal(mask(path, value) if is_masked else value)}"
        return written if origins is None else f"{written}  # {origins.get(dotted(path), 'default')}"

    return "\n".join(_lines(config, (), type(config)() if omits_defaults else None, format_line)).strip() + "\n"


def _lines(
    section: Section, path: KeyPath, defaults: Section | None, format_line: Callable[[str, object, KeyPath], str]
) -> Iterator[str]:
    """Yield the lines of a section. Values come before tables, because TOML takes a value after a table as part of that table.

    Args:
        defaults: a section whose values are left out; None leaves out nothing.
        format_line: returns the line of a key, from its name, its value and its path.
    """
    tables: list[tuple[str, object]] = []
    for name, field in type(section).model_fields.items():
        value: object = getattr(section, name)
        is_default = defaults is not None and value == getattr(defaults, name)
        if is_default or (value is None and field.get_default(call_default_factory=True) is None):
            continue
        if isinstance(value, Section) or _sections_in(value) or as_table(value):
            tables.append((name, value))
        else:
            yield format_line(name, value, (*path, name))
    for name, value in tables:
        table_path = (*path, name)
        # TOML has no indexes: a table in a list belongs to the list's last entry.
        header = ".".join(toml_key(part) for part in table_path if isinstance(part, str))
        if isinstance(value, Section):
            default = getattr(defaults, name, None)
            inner = default if type(default) is type(value) else None  # another type of section has other defaults
            yield from ("", f"[{header}]", *_lines(value, table_path, inner, format_line))
        elif table := as_table(value):
            yield from ("", f"[{header}]", *(format_line(key, item, (*table_path, key)) for key, item in table.items()))
        for index, item in enumerate(_sections_in(value)):
            yield from ("", f"[[{header}]]", *_lines(item, (*table_path, index), None, format_line))


def literal(value: object) -> str:
    """Return `value` as a TOML value on one line."""
    if value is None:
        return '"None"'
    if (table := as_table(value)) is not None:
        items = ", ".join(f"{toml_key(name)} = {literal(item)}" for name, item in table.items())
        return f"{{ {items} }}" if items else "{}"
    if (elements := as_list(value)) is not None:
        return f"[{', '.join(literal(element) for element in elements)}]"
    scalar = value if isinstance(value, bool | int | float) else str(value)
    return tomli_w.dumps({"value": scalar}).removeprefix("value = ").removesuffix("\n")


def _sections_in(value: object) -> list[Section]:
    return [item for item in as_list(value) or [] if isinstance(item, Section)]


def toml_key(name: str) -> str:
    """Return a name as TOML writes a key."""
    return name if _BARE_KEY.fullmatch(name) else literal(name)
