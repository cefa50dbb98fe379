"""Keys, commands, scripts and files that the documentation names exist."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.documents import ROOT
from trivet.cli.main import TOOLS
from trivet.config.keys import find_key
from trivet.config.schema.base import Section
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.inference import InferenceConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.sft import SftConfig
from trivet.config.schema.trainer import TrainerConfig
from trivet.config.schema.vf_rl import VfRLConfig

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODELS: list[type[Section]] = [RLConfig, VfRLConfig, TrainerConfig, OrchestratorConfig, InferenceConfig, SftConfig, EvalConfig]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
OTHER_PROGRAMS = {"python", "mkdocs", "torchrun", "wandb", "tensorboard"}
"""Commands of others that the pages start with `uv run`."""

_FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_TABLE_HEADER = re.compile(r"\[{1,2}([a-z_]+(?:\.[a-z_]+)*)\]{1,2}")
_DOTTED = re.compile(r"[a-z_]+(?:\.[a-z_0-9]+)+")
_UV_RUN = re.compile(r"uv run (?:--project \S+ |--no-sync )?([a-z][\w-]*)(?: ([a-z]+))?")
_SCRIPT = re.compile(r"scripts/[\w/]+\.(?:py|sh)")
_OTHER_NAMES = {"trivet", "torch", "datasets", "inputs", "trace", "kernel", "user"}
"""First parts of dotted names that are no keys: packages, arguments of a loss, a file, settings of Linux."""
_FILE_SUFFIXES = {"delta", "gz", "jsonl", "json", "toml", "yaml", "py", "md", "safetensors", "stdout", "log", "sh"}


def _page(path: Path) -> object:
    return pytest.param(path, id=str(path.relative_to(ROOT)))


every_page = pytest.mark.parametrize("path", [_page(path) for path in PAGES])


def is_key(*parts: str) -> bool:
    return any(find_key(model, parts) for model in MODELS)


def written_keys(text: str) -> Iterator[str]:
    """Return dotted keys and table headers between backticks, outside of blocks."""
    for code in re.findall(r"`([^`\n]+)`", _FENCE.sub("", text)):
        for name in [*_TABLE_HEADER.findall(code), *(_DOTTED.findall(code) if re.match(r"[a-z_]+\.[a-z_]", code) else [])]:
            if name.rpartition(".")[2] not in _FILE_SUFFIXES and name.partition(".")[0] not in _OTHER_NAMES:
                yield name


def leaves(table: dict[str, object], *above: str) -> Iterator[tuple[str, ...]]:
    for name, value in table.items():
        rows = value if isinstance(value, list) else [value]
        tables = [row for row in rows if isinstance(row, dict)]
        for row in tables:
            yield from leaves(row, *above, name)
        if not tables:
            yield (*above, name)


@every_page
def test_every_key_that_a_page_names_exists(path: Path):
    assert {name for name in written_keys(path.read_text()) if not is_key(*name.split("."))} == set()


@every_page
def test_every_toml_block_is_a_configuration_of_one_command(path: Path):
    for block in _FENCE.finditer(path.read_text()):
        if block["language"] == "toml":
            written = list(leaves(tomllib.loads(block["text"])))
            fitting = [model for model in MODELS if all(find_key(model, leaf) for leaf in written)]
            assert fitting, block["text"]


@every_page
def test_every_command_and_script_that_a_page_names_exists(path: Path):
    text = path.read_text()
    for program, word in _UV_RUN.findall(text):
        assert program in {*SCRIPTS, *OTHER_PROGRAMS}, program
        assert program != "trivet" or not word or word in TOOLS, word
    for script in _SCRIPT.findall(text):
        assert (ROOT / script).exists(), script


def test_the_page_of_commands_has_them_all():
    text = (ROOT / "docs" / "index.md").read_text()
    missing = [f"uv run {name}" for name in SCRIPTS if f"`uv run {name}" not in text]
    missing += [f"uv run trivet {name}" for name in TOOLS if f"`uv run trivet {name}" not in text]
    assert not missing


@every_page
def test_the_links_of_a_page_lead_somewhere(path: Path):
    links = re.findall(r"\]\((?!https?://)([^)#\s]+)", _FENCE.sub("", path.read_text()))
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_the_page_on_architecture_names_code_that_exists():
    text = (ROOT / "docs" / "architecture.md").read_text()
    walks = text[text.index("## To change") : text.index("## Packages")]
    named = re.findall(r"`([a-z_/]+(?:/|\.py))(?::([\w.]+))?`", walks)
    assert len(named) > 60
    missing = [f"{path}:{name}" for path, name in named if not is_defined(ROOT / "src" / "trivet" / path, name)]
    assert not missing


def is_defined(path: Path, name: str) -> bool:
    """Return whether the file or directory exists and defines `name`: a function, a class, or a method as `Class.method`."""
    if not name:
        return path.exists()
    body = ast.parse(path.read_text()).body if path.is_file() else []
    for part in name.split("."):
        found = [node for node in body if getattr(node, "name", None) == part]
        if not found:
            return False
        body = getattr(found[0], "body", [])
    return True


def test_the_page_on_architecture_shows_the_packages_and_their_layers():
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = re.findall(r"^\| (`[a-z_`, ]+) \|", text[text.index("## Packages") :], re.MULTILINE)
    source = ROOT / "src" / "trivet"
    units = {path.stem for path in source.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()} - {"__init__"}
    assert {name for row in table for name in re.findall(r"[a-z_]+", row)} == units
    shown = next(block["text"] for block in _FENCE.finditer(text) if "errors" in block["text"])
    layers = [set(re.findall(r"[a-z_]+", layer)) for layer in shown.split("<")]
    tested = re.search(r"^LAYERS = (\[.*?^\])", (ROOT / "tests/unit/test_imports.py").read_text(), re.MULTILINE | re.DOTALL)
    assert tested
    assert layers == [set(re.findall(r"[a-z_]+", line)) for line in re.findall(r"\{(.*?)\}", tested[1], re.DOTALL)]
