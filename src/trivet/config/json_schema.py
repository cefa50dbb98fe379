"""Writes the JSON schema of a configuration file, by which editors complete and check TOML. `trivet schema` calls it.

pydantic makes the schema. Added here are the documentation of the keys and what only TOML files have. The spellings of others that
commands accept (`config.spellings`) are left out: an editor marks such a key, and the command says what it is called here.
"""

from typing import Any, cast

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from trivet.config.reference import field_doc
from trivet.config.schema.base import Section
from trivet.config.sources import INHERIT_KEY
from trivet.config.spellings import SWITCHES

_DASHES = {"^[^-]+-": {"description": "A file may write dashes in place of the underscores of a key.", "deprecated": True}}
_SWITCHES = {name.rpartition(".")[2] for name in SWITCHES}
"""Sections that a file may also turn on by `true`."""
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
            if name in _SWITCHES and {"type": "boolean"} not in value["anyOf"]:
                value["anyOf"].append({"type": "boolean"})
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
    return schema
