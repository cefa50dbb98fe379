"""Writes documents of YAML, and merges what a user overrides into them. Pure."""

import math
import re
from typing import Any

import yaml

from trivet.config.tables import as_list, as_table

_PLAIN_KEY = re.compile(r"[A-Za-z][A-Za-z_./-]{2,}")
"""A key that no reader reads as a number."""


class _Dumper(yaml.SafeDumper):
    """Writes YAML that every reader understands alike: no anchors, texts quoted, texts of several lines as they are."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else '"')

    def represent_table(self, table: dict[str, object]) -> yaml.MappingNode:
        node = self.represent_mapping("tag:yaml.org,2002:map", table.items())
        for key, _ in node.value:
            if _PLAIN_KEY.fullmatch(key.value):
                key.style = None  # PyYAML itself quotes `off` and the like
        return node


_Dumper.add_representer(str, _Dumper.represent_text)
_Dumper.add_representer(dict, _Dumper.represent_table)


def to_yaml(documents: list[dict[str, Any]]) -> str:
    """Return documents as YAML.

    Every text is quoted: readers differ in whether `y`, `1e3` or `0o7` without quotes is a text.
    """
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=math.inf, explicit_start=True)


def merge(value: Any, override: Any) -> Any:
    """Return a part of a pod with an override: tables and lists of named things are merged, anything else is replaced."""
    ours, theirs = as_table(value), as_table(override)
    if ours is not None and theirs is not None:
        return {**ours, **{name: merge(ours.get(name), each) for name, each in theirs.items()}}
    our_items, their_items = _by_name(value), _by_name(override)
    if our_items and their_items:
        return list({**our_items, **{name: merge(our_items.get(name), each) for name, each in their_items.items()}}.values())
    return override


def without_none(table: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of `table` that have a value."""
    return {name: value for name, value in table.items() if value is not None}


def _by_name(value: object) -> dict[object, dict[str, object]] | None:
    """Return the items of a list by what Kubernetes tells them apart by; None when it is no such list."""
    tables = [as_table(each) for each in as_list(value) or []]
    found = {table.get("mountPath", table.get("name")): table for table in tables if table is not None}
    return found if len(found) == len(tables) and None not in found else None
