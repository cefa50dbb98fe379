"""Tells tables and lists apart in values that came from TOML or JSON. Imports nothing, so an environment worker can use it too."""

from typing import cast


def as_table(value: object) -> dict[str, object] | None:
    """Return `value` if it is a table, else None."""
    return cast("dict[str, object]", value) if isinstance(value, dict) else None


def as_list(value: object) -> list[object] | None:
    """Return `value` if it is a list, else None."""
    return cast("list[object]", value) if isinstance(value, list) else None
