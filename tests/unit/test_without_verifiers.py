"""trivet runs without verifiers: it belongs to the environments, which may have a virtual environment of their own."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "trivet"
NEEDS_VERIFIERS = (
    "trivet.environments.apis.v",  # the adapters, one for each generation of its API
    "trivet.examples.environments_data",  # plays the example environments
    "trivet.examples.quickstart_data",  # takes its texts from the environment reverse-text
)
"""Beginnings of the names of modules that import verifiers, or an environment."""
HEAVY = ("trivet.inference", "trivet.trainer")
"""Import vLLM and torch for many seconds. They are read instead."""
COMMANDS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]

BLOCK = """
import importlib, sys
from importlib.abc import MetaPathFinder

class Blocked(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "verifiers":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None

sys.meta_path.insert(0, Blocked())
"""


def run(program: str, *words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCK + program, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=cwd)


def module_name(path: Path) -> str:
    parts = ("trivet", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_module_but_the_adapters_names_verifiers_in_an_import() -> None:
    modules = {module_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")}
    imported = {
        name
        for name, tree in modules.items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Import) and any(alias.name.partition(".")[0] == "verifiers" for alias in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "verifiers")
    }
    assert not {name for name in imported if not name.startswith(NEEDS_VERIFIERS)}


def test_every_module_but_the_adapters_is_imported() -> None:
    names = sorted(module_name(path) for path in SOURCE.rglob("*.py"))
    names = [name for name in names if not name.startswith((*NEEDS_VERIFIERS, *HEAVY))]
    assert len(names) > 200
    program = f"""
failed = {{}}
for name in {names!r}:
    try:
        importlib.import_module(name)
    except ImportError as exc:
        failed[name] = str(exc)
sys.exit(repr(failed) if failed else None)
"""
    done = run(program)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_answers(command: str) -> None:
    module, _, function = COMMANDS[command].partition(":")
    program = f"sys.argv[0] = {command!r}\nsys.exit(importlib.import_module({module!r}).{function}())"
    done = run(program, "--help")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith("usage:")


@pytest.mark.slow
def test_a_run_is_planned() -> None:
    program = "sys.exit(importlib.import_module('trivet.startup').rl())"
    done = run(program, "@", "configs/reverse_text/rl.toml", "--dry-run")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "reverse-text" in done.stdout
