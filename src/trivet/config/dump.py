"""Writes a configuration as TOML that loads to the same configuration, plain for roles or with origins for people."""

import re
from collections.abc import Iterator, Mapping

import tomli_w

from trivet.config.keys import KeyPath, dotted
from trivet.config.masking import mask
from trivet.config.schema.base import Section
from trivet.config.tables import as_list, as_table

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(
    config: Section, *, origins: Mapping[str, str] | None = None, is_masked: bool = False, omits_defaults: bool = False
) -> str:
    """Return every key of `config`. A null that is the default is left out; another is written as the text "None".

    Args:
        origins: where values came from, by dotted key. If given, each line ends with a comment that says it.
        is_masked: secrets are hidden, for whoever only looks: such a text does not start a role.
        omits_defaults: what has its default is left out, for whoever looks for what was changed.
    """
    defaults = type(config)() if omits_defaults else None
    return "\n".join(_section_lines(config, (), origins, defaults, is_masked=is_masked)).strip() + "\n"


def literal(value: object) -> str:
    """Return `value` as TOML on one line."""
    if value is None:
        return '"None"'
    if (table := as_table(value)) is not None:
        items = ", ".join(f"{_key(name)} = {literal(item)}" for name, item in table.items())
        return f"{{ {items} }}" if items else "{}"
    if (elements := as_list(value)) is not None:
        return f"[{', '.join(literal(element) for element in elements)}]"
    scalar = value if isinstance(value, bool | int | float) else str(value)
    return tomli_w.dumps({"value": scalar}).removeprefix("value = ").removesuffix("\n")


def _section_lines(
    section: Section, path: KeyPath, origins: Mapping[str, str] | None, defaults: Section | None, *, is_masked: bool
) -> Iterator[str]:
    """Yield values before tables: TOML would count a value after a table to that table.

    Args:
        defaults: values that are left out.
    """
    tables: list[tuple[str, object]] = []
    for name, field in type(section).model_fields.items():
        value: object = getattr(section, name)
        if defaults is not None and value == getattr(defaults, name):
            continue
        if value is None:
            if field.get_default(call_default_factory=True) is None:
                continue
            value = "None"
        if isinstance(value, Section) or _sections_in(value) or as_table(value):
            tables.append((name, value))
        else:
            yield _line(name, value, (*path, name), origins, is_masked=is_masked)
    for name, value in tables:
        here = (*path, name)
        if isinstance(value, Section):
            default = getattr(defaults, name, None)
            inner = default if type(default) is type(value) else None
            yield from ("", f"[{_header(here)}]", *_section_lines(value, here, origins, inner, is_masked=is_masked))
        elif table := as_table(value):
            lines = (_line(key, item, (*here, key), origins, is_masked=is_masked) for key, item in table.items())
            yield from ("", f"[{_header(here)}]", *lines)
        else:
            for index, item in enumerate(_sections_in(value)):
                lines = _section_lines(item, (*here, index), origins, None, is_masked=is_masked)
                yield from ("", f"[[{_header(here)}]]", *lines)


def _sections_in(value: object) -> list[Section]:
    return [item for item in as_list(value) or [] if isinstance(item, Section)]


def _header(path: KeyPath) -> str:
    """Return the name of a table. Inside a list it belongs to the last entry written: indices are no part of its name."""
    return ".".join(_key(part) for part in path if isinstance(part, str))


def _line(name: str, value: object, path: KeyPath, origins: Mapping[str, str] | None, *, is_masked: bool) -> str:
    line = f"{_key(name)} = {literal(mask(path, value) if is_masked else value)}"
    return line if origins is None else f"{line}  # {origins.get(dotted(path), 'default')}"


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else literal(name)
