"""The JSON schemas describe the files that the commands read, and say what spellings of others do."""

import os
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from trivet.config.json_schema import json_schema
from trivet.config.reference import EXAMPLES
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.trainer import TrainerConfig

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
        ("[trainer.model]\ntp = 2", "2 is not one of [1]"),
        ("[orchestrator]\ntoken_batch_size = 4096", "should not be valid under {}"),
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
        "inference_gpus = 2",
        "[trainer.model]\nac = true",
        '[orchestrator.train.sampling]\nmax_completion_tokens = 16\n[[orchestrator.train.env]]\nid = "words"',
        "[trainer.model.experimental.lora]\nrank = 8",
        '[orchestrator]\ngroup_size = 4\n[monitors.wandb]\nproject = "p"',
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


def test_a_key_has_its_documentation_its_bounds_and_what_it_is_called_here() -> None:
    run = SCHEMAS["rl"]
    size = at(run, "orchestrator", "batch_size")
    assert (size["description"], size["minimum"], size["default"]) == ("Rollouts per step.", 1, 128)
    old = at(run, "orchestrator", "group_size")
    assert old["deprecated"]
    assert old["description"] == "orchestrator.group_size is called orchestrator.rollouts_per_example here."
    assert "trainer.model.impl has no effect" in at(run, "trainer", "model", "impl")["description"]
    assert json_schema(TrainerConfig)["properties"]["max_concurrent_runs"]["enum"] == [1]
    assert "orchestrator.train.sampling is called orchestrator.sampling here" in at(run, "orchestrator", "train")["description"]
    assert "clean" in json_schema(RLConfig)["properties"]
