"""Computes from the sources which modules of trivet a module imports, directly and through others, inside functions too."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "trivet"


def file_of(module: str) -> Path | None:
    """Return the source of `trivet.a.b`; None when it names no module."""
    path = SOURCE.joinpath(*module.split(".")[1:])
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def closure(roots: Iterable[str]) -> dict[str, set[str]]:
    """Return the modules of trivet that `roots` need, packages above them included, each with what else it imports."""
    found: dict[str, set[str]] = {}
    pending = list(roots)
    while pending:
        module = pending.pop()
        if module in found or (file := file_of(module)) is None:
            continue
        names = set(_imports(ast.parse(file.read_text()).body))
        found[module] = {name.partition(".")[0] for name in names if not name.startswith("trivet")}
        pending += [name for name in names if name.startswith("trivet")]
        if "." in module:
            pending.append(module.rpartition(".")[0])
    return found


def _imports(body: Iterable[ast.stmt]) -> Iterator[str]:
    for statement in body:
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield node.module or ""
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
