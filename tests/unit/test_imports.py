"""Check from the sources who imports whom (docs/architecture.md). Imports inside functions count."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "trivet"

LAYERS = [
    {"shown_text", "errors"},
    {"key_names"},
    {"backoff", "machine", "process", "storage"},
    {"faults", "dependencies"},
    {"startup"},
    {"wire"},
    {"algorithms", "exits"},
    {"config"},
    {"secret", "gate", "step_directories"},
    {"telemetry", "environments", "conversations", "client", "transport", "weights", "checkpoints", "examples"},
    {"schedulers", "transfer"},
    {"evaluation", "inference", "trainer", "origin", "launcher"},
    {"orchestrator", "dialects"},
    {"history"},
    {"view"},
    {"cli", "library"},
]
"""Lowest first. A package imports lower layers and itself, never a neighbour of its own layer."""

ROLES = {"inference", "trainer", "orchestrator", "origin"}
WITHOUT_TORCH = [
    "config",
    "wire",
    "algorithms",
    "orchestrator",
    "schedulers",
    "launcher",
    "dialects",
    "transport",
    "telemetry",
    "client",
    "conversations",
    "weights",
    "checkpoints",
    "history",
    "view",
    "cli",
    "library",
    "trivet",
]


def module_name(path: Path) -> str:
    parts = ("trivet", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """Return line and absolute name of every import in `path`, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively; write the absolute name"
            yield node.lineno, node.module or ""
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def unit(module: str) -> str:
    """Return the package: `wire` for `trivet.wire.codec`, a top-level module's own name otherwise."""
    name = module.split(".")[1] if "." in module else module
    return "launcher" if name == "cluster" else name  # the launcher's part for many machines, in a package of its own


def layer(name: str) -> int:
    """The place of a unit; `trivet` itself, whose names are those of the library, is above all."""
    return len(LAYERS) if name == "trivet" else next(index for index, names in enumerate(LAYERS) if name in names)


SOURCES = sorted(SOURCE.rglob("*.py"))


def test_every_package_has_its_place_in_the_table():
    units = {unit(module_name(path)) for path in SOURCES if module_name(path) != "trivet"}
    assert units == set().union(*LAYERS)


def test_no_module_imports_one_above_it_or_a_neighbour():
    faults = [
        f"{path.relative_to(SOURCE)}:{line} imports {name}"
        for path in SOURCES
        for line, name in imported_modules(path)
        if name.startswith("trivet.")
        and unit(name) != unit(module_name(path))
        and layer(unit(name)) >= layer(unit(module_name(path)))
    ]
    assert not faults, "\n".join(faults)


def test_no_role_imports_a_role_and_the_launcher_imports_none():
    faults = [
        f"{path.relative_to(SOURCE)}:{line} imports {name}"
        for path in SOURCES
        if unit(module_name(path)) in ROLES | {"launcher"}
        for line, name in imported_modules(path)
        if name.startswith("trivet.") and unit(name) in ROLES - {unit(module_name(path))}
    ]
    assert not faults, "\n".join(faults)


def test_what_reads_a_run_imports_no_role_and_not_the_launcher():
    """A package below both holds what two roles, or a role and a reader, need to know of a file."""
    faults = [
        f"{path.relative_to(SOURCE)}:{line} imports {name}"
        for path in SOURCES
        if unit(module_name(path)) in {"history", "view"}
        for line, name in imported_modules(path)
        if name.startswith("trivet.") and unit(name) in ROLES | {"launcher"}
    ]
    assert not faults, "\n".join(faults)


def test_no_pure_package_names_torch_or_vllm():
    faults = [
        f"{path.relative_to(SOURCE)}:{line} imports {name}"
        for path in SOURCES
        if unit(module_name(path)) in WITHOUT_TORCH
        for line, name in imported_modules(path)
        if name.split(".")[0] in ("torch", "vllm")
    ]
    assert not faults, "\n".join(faults)


def test_a_fresh_interpreter_imports_the_pure_packages_without_torch_and_vllm():
    modules = [module_name(path) for path in SOURCES if unit(module_name(path)) in WITHOUT_TORCH]
    program = (
        f"import importlib, sys\nfor name in {modules!r}:\n    importlib.import_module(name)\n"
        "    assert not {'torch', 'vllm'} & sys.modules.keys(), name"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stderr


def test_the_reader_of_imports_sees_those_inside_functions(tmp_path):
    file = tmp_path / "lazy.py"
    file.write_text("def f():\n    from trivet.trainer import loop\n    import torch\n")
    assert [name for _, name in imported_modules(file)] == ["trivet.trainer", "trivet.trainer.loop", "torch"]
