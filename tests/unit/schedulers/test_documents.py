from typing import Any

import pytest
import yaml

from trivet.schedulers.documents import merge, to_yaml, without_none


@pytest.mark.parametrize(
    "value", ["1", "1e3", "0o7", "y", "no", "null", "~", "a: b", "#x", "$(HOME)", "two\nlines", "é", " ", ""]
)
def test_every_text_stays_a_text_for_every_reader(value: str):
    document = {"key": value, "list": [value, value], value or "empty": 1}
    written = to_yaml([document])
    assert next(yaml.safe_load_all(written)) == document
    assert "\n" in value or f'key: "{value}"' in written
    assert f"\n{value}: 1" not in written  # quoted as a key too


def test_what_occurs_twice_is_written_twice():
    shared = {"name": "a"}
    assert to_yaml([{"one": shared, "two": shared}, {"three": [1, True]}]) == (
        '---\none:\n  name: "a"\ntwo:\n  name: "a"\n---\nthree:\n- 1\n- true\n'
    )


@pytest.mark.parametrize(
    ("value", "override", "merged"),
    [
        ({"a": 1, "b": {"c": 2}}, {"b": {"d": 3}}, {"a": 1, "b": {"c": 2, "d": 3}}),
        ([{"name": "a", "x": 1}], [{"name": "a", "y": 2}, {"name": "b"}], [{"name": "a", "x": 1, "y": 2}, {"name": "b"}]),
        ([{"mountPath": "/a", "name": "v"}], [{"mountPath": "/b", "name": "v"}], None),
        ([{"key": "a"}], [{"key": "b"}], [{"key": "b"}]),
        (["a"], ["b"], ["b"]),
        ("a", {"b": 1}, {"b": 1}),
    ],
)
def test_tables_and_lists_of_named_things_are_merged_and_the_rest_is_replaced(value: Any, override: Any, merged: Any):
    assert merge(value, override) == (merged if merged is not None else [*value, *override])


def test_entries_without_a_value_are_left_out():
    assert without_none({"a": 0, "b": None, "c": ""}) == {"a": 0, "c": ""}
