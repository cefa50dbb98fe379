"""The JSON schemas describe the files that the commands read."""

import os
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from trivet.config.json_schema import json_schema
from trivet.config.reference import EXAMPLES

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "configs").rglob("*.toml"))
SCHEMAS = {command: json_schema(kind) for kind, (command, _) in EXAMPLES.items()}


def problems(text: str, command: str = "rl") -> list[str]:
    """Return what an editor would mark in a file."""
    return [error.message for error in jsonschema.Draft202012Validator(SCHEMAS[command]).iter_errors(tomllib.loads(text))]


@pytest.mark.parametrize("command", SCHEMAS)
def test_a_schema_is_one(command: str) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[command])


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_file_names_the_schema_of_its_command_and_fits_it(file: Path) -> None:
    first, _, rest = file.read_text().partition("\n")
    directory, name = os.path.split(first.removeprefix("#:schema "))
    assert (file.parent / directory).resolve() == ROOT / ".schemas"
    assert problems(rest, name.removesuffix(".json")) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_step = 3", "'max_step' does not match any of the regexes"),
        ("max_steps = 0", "0 is not valid under any of the given schemas"),
        ('[trainer.optim]\nlr = "fast"', "is not valid under any of the given schemas"),
        ("[orchestrator]\ngroup_size = 4", "'group_size' does not match any of the regexes"),
    ],
)
def test_a_mistake_is_marked(text: str, message: str) -> None:
    assert any(message in problem for problem in problems(text)), problems(text)


@pytest.mark.parametrize(
    "text",
    [
        'inference = "None"',
        'toml_files = ["base.toml"]',
        "max-steps = 3",
        "[trainer.model]\nac = true",
    ],
)
def test_what_is_accepted_is_not_marked(text: str) -> None:
    assert problems(text) == []


def at(schema: dict[str, Any], *path: str) -> dict[str, Any]:
    for part in path:
        schema = schema["properties"][part]
        schema = next((choice for choice in schema.get("anyOf", []) if "$ref" in choice), schema)
        schema = SCHEMAS["rl"]["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    return schema


def test_a_key_has_its_documentation_its_bounds_and_its_default() -> None:
    size = at(SCHEMAS["rl"], "orchestrator", "batch_size")
    assert (size["description"], size["minimum"], size["default"]) == ("Rollouts per step.", 1, 128)
