"""How many small faults in the modules that hold the guarantees do their unit tests find?

Each fault changes one place of one module: a comparison, an operator, a number, a truth value, a condition, or a statement that is
left out. `COUNT` faults of each module are drawn with a seed. A fault is found if one of the unit tests of its package
that name it fails or does not end. The ceiling is 100 % less the faults that change no behaviour, which nobody has counted.

The last line is one JSON object; docs/benchmarks/mutants.json keeps those of two revisions. A module is changed while its tests run
and restored afterwards, so use a checkout in which nobody works:

    uv run python scripts/bench/mutants.py src/trivet/algorithms/packing.py …
"""

import ast
import copy
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

COUNT, SEED = 8, 1
PYTEST = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
COMPARISONS |= {ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is}
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Add}


def faults(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may stand in the node's place."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS:
            yield ast.Compare(node.left, [COMPARISONS[type(operator)]()], node.comparators)
        case ast.BinOp() if type(node.op) in OPERATORS:
            yield ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
        case ast.BoolOp():
            yield ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value)
        case ast.Constant(value=int() | float() as number):
            yield ast.Constant(number + 1)
        case ast.If() | ast.While():
            changed = copy.copy(node)
            changed.test = ast.UnaryOp(ast.Not(), node.test)
            yield changed
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Delete() | ast.Raise():
            yield ast.Pass()


def places(parent: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """Yield each parent, its field and index, and what may stand there. Annotations, decorators and log lines are left out."""
    for name, value in ast.iter_fields(parent):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for index, child in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(child, ast.AST) and not ast.unparse(child).startswith(("_log.", "log.", "logger.")):
                for fault in faults(child):
                    yield parent, name, index if isinstance(value, list) else None, fault
                yield from places(child)


def mutants(source: str) -> list[tuple[str, str]]:
    """Return where each drawn fault is, and the module with it."""
    count = len(list(places(ast.parse(source))))
    found = []
    for number in random.Random(SEED).sample(range(count), min(COUNT, count)):
        tree = ast.parse(source)
        parent, name, index, fault = list(places(tree))[number]
        before = getattr(parent, name) if index is None else getattr(parent, name)[index]
        if index is None:
            setattr(parent, name, fault)
        else:
            getattr(parent, name)[index] = fault
        where = f"line {before.lineno}: {ast.unparse(before)[:60]!r} -> {ast.unparse(ast.fix_missing_locations(fault))[:60]!r}"
        found.append((where, ast.unparse(tree)))
    return found


def tests_pass(tests: list[str], *, timeout_s: float) -> bool:
    try:
        return subprocess.run([*PYTEST, *tests], capture_output=True, timeout=timeout_s, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def examine(path: Path) -> dict[str, object]:
    """Return how many faults were drawn and found, and where the others are."""
    directory = Path("tests/unit", *path.parts[2:-1])
    tests = sorted(str(file) for file in directory.rglob("test_*.py") if path.stem in file.read_text()) or [str(directory)]
    assert tests_pass(tests, timeout_s=1800), f"{path}: {tests} fail without a fault"
    source, drawn, missed = path.read_text(), mutants(path.read_text()), []
    try:
        for where, mutant in drawn:
            for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
                cached.unlink()  # Python compares whole seconds, and a fault may keep the size
            path.write_text(mutant)
            if tests_pass(tests, timeout_s=300):
                missed.append(where)
            print(f"{path}, {where}: {'missed' if where in missed else 'found'}", flush=True)
    finally:
        path.write_text(source)
    return {"faults": len(drawn), "found": len(drawn) - len(missed), "missed": missed}


if __name__ == "__main__":
    print(json.dumps({name: examine(Path(name)) for name in sys.argv[1:]}))
