"""The resolved configuration of each role, as dotted keys; what may be a secret is left out."""

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from trivet.config.layout import RunLayout
from trivet.config.masking import HIDDEN, mask_table
from trivet.view.files import NotServed, read_inside


def read_configs(layout: RunLayout) -> dict[str, dict[str, str]]:
    """Return by role each key's value as TOML would write it. A file that cannot be read says so in its place."""
    if not layout.configs.is_dir():
        return {}
    found: dict[str, dict[str, str]] = {}
    for path in sorted(layout.configs.glob("*.toml")):
        try:
            found[path.stem] = dict(_flatten(mask_table(tomllib.loads(read_inside(layout.root, path).decode("utf-8")))))
        except (NotServed, ValueError, RecursionError) as exc:
            found[path.stem] = {"(fault)": f"cannot be read: {exc}"}
    return found


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{name}.")
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            for index, item in enumerate(value):
                yield from _flatten(item, f"{name}[{index}].")
        else:
            yield name, _written(value)


def _written(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if value == HIDDEN:
        return HIDDEN
    return f'"{value}"' if isinstance(value, str) else str(value)
