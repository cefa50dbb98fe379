"""Recognizes tables and lists in values from TOML or JSON. Imports nothing of trivet, so environment workers can use it too."""

from typing import cast


def as_table(value: object) -> dict[str, object] | None:
    """Return `value` if it is a table, else None."""
    return cast("dict[str, object]", value) if isinstance(value, dict) else None


def as_list(value: object) -> list[object] | None:
    """Return `value` if it is a list, else None."""
    return cast("list[object]", value) if isinstance(value, list) else None
