"""Writes the JSON schema of a configuration file, by which editors complete and check TOML. `trivet schema` calls it.

pydantic makes the schema. Added here are the documentation of the keys, what only TOML files have, and the accepted spellings of
others (`config.spellings`): editors then show what such a key is called here, or why it is refused.
"""

import json
from collections.abc import Iterator
from typing import Any, cast

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from trivet.config.keys import KeyPath
from trivet.config.reference import field_doc
from trivet.config.schema.base import Section
from trivet.config.sources import INHERIT_KEY
from trivet.config.spellings import GPU_COUNTS, IGNORED, REFUSED, RENAMED, ROLE_PREFIXES, SINGLE_VALUES, SWITCHES

_DASHES = {"^[^-]+-": {"description": "A file may write dashes in place of the underscores of a key.", "deprecated": True}}
_INHERIT = {
    "type": "array",
    "items": {"type": "string"},
    "description": "Files from which this one inherits, counted from its folder. A later file wins.",
}


class _Generator(GenerateJsonSchema):
    """Generates the schema of TOML, which has no null: a key takes the text "None" for it."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        """Add the docstring under each field, which pydantic does not read."""
        found = super().model_schema(schema)
        section = cast("type[Section]", schema["cls"])
        for name, value in found.get("properties", {}).items():
            value["description"] = field_doc(section, name) or value.get("description", "")
        found["patternProperties"] = _DASHES
        return found

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        """Write null as the text "None"."""
        return self.get_union_of_schemas([{"const": "None"}, self.generate_inner(schema["schema"])])

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        """Leave out a default that TOML cannot write."""
        found = super().default_schema(schema)
        if found.get("default", "") is None:
            del found["default"]
        return found

    def tagged_union_schema(self, schema: core_schema.TaggedUnionSchema) -> JsonSchemaValue:
        """Allow a table that fits several types: without the key `type` it is of the default one."""
        found = super().tagged_union_schema(schema)
        return {"anyOf": found.pop("oneOf"), **found} if "oneOf" in found else found

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Repeat no key as its title."""
        return False


def json_schema(kind: type[Section]) -> dict[str, Any]:
    """Return the schema of the files of one command."""
    schema = kind.model_json_schema(schema_generator=_Generator)
    schema["$schema"] = _Generator.schema_dialect
    schema["properties"][INHERIT_KEY] = _INHERIT
    for name in SWITCHES:
        path = _path(kind, name)
        for holder in _holders(schema, path[:-1]) if path else ():
            switch = holder["properties"].get(path[-1])
            if switch is not None and {"type": "boolean"} not in switch.get("anyOf", []):
                holder["properties"][path[-1]] = {"anyOf": [switch, {"type": "boolean"}]}
    for old, (text, allowed) in _old_spellings().items():
        if path := _path(kind, old):
            _add_old_key(schema, path, text=f"{old} {text}", allowed=allowed)
    return schema


def _old_spellings() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return what each accepted or refused spelling does, and the schema of the values that it may have."""
    gpus = {old: (f"sets {role}_gpu_ids to so many GPUs", {"type": "integer"}) for old, role in GPU_COUNTS.items()}
    renamed = {old: (f"is called {new} here", {"deprecated": True}) for old, new in RENAMED.items()}
    ignored = {old: (f"has no effect: {reason}", {"deprecated": True}) for old, reason in IGNORED.items()}
    refused: dict[str, tuple[str, dict[str, Any]]] = {
        old: (f"does not exist here: {reason}", {"not": {}}) for old, reason in REFUSED.items()
    }
    single = {
        old: (f"has one value here, {value}: remove the key", {"enum": [_value(value)]}) for old, value in SINGLE_VALUES.items()
    }
    return {**refused, **ignored, **single, **renamed, **gpus}


def _add_old_key(schema: dict[str, Any], path: KeyPath, *, text: str, allowed: dict[str, Any]) -> None:
    """Add a spelling at the first part of `path` that the schema does not have. Existing keys stay as they are."""
    for end in range(len(path)):
        holders = list(_holders(schema, path[:end]))
        if not holders or any("properties" not in holder for holder in holders):
            return
        name = str(path[end])
        missing = [holder["properties"] for holder in holders if name not in holder["properties"]]
        if len(missing) < len(holders):
            old = next(holder["properties"][name] for holder in holders if name in holder["properties"])
            if old.get("deprecated") and text not in old["description"]:
                old["description"] += f" {text}."
                return
            continue
        whole = allowed if end == len(path) - 1 else {"deprecated": True}
        for properties in missing:
            properties[name] = {"description": f"{text}.", **whole}
        return


def _holders(schema: dict[str, Any], path: KeyPath, *, at: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the schemas of the tables at `path`. There are several if a `type` key chooses one."""
    here = schema if at is None else at
    if "$ref" in here:
        here = schema["$defs"][here["$ref"].rpartition("/")[2]]
    if "anyOf" in here:
        for choice in here["anyOf"]:
            yield from _holders(schema, path, at=choice)
    elif here.get("type") == "array":
        yield from _holders(schema, path, at=here["items"])
    elif not path and here.get("type") == "object":
        yield here
    elif path and (inner := here.get("properties", {}).get(path[0])) is not None:
        yield from _holders(schema, path[1:], at=inner)


def _path(kind: type[Section], name: str) -> KeyPath:
    """Return the path in a file of `kind` for a name of the tables; empty if it belongs to another command."""
    path, prefix = tuple(name.split(".")), ROLE_PREFIXES.get(kind, ())
    return path[len(prefix) :] if path[: len(prefix)] == prefix else ()


def _value(text: str) -> object:
    """Return the value that the tables write as text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
