"""No module unpickles what arrives. The sources are searched."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for folder in ("src", "environments", "scripts") for path in (ROOT / folder).rglob("*.py"))
PICKLING = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "pickletools"}
OBJECTS = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
    "send_pyobj",
    "recv_pyobj",
    "read_pickle",
}
ALLOWED = {
    ("src/trivet/trainer/checkpoint/state.py", "import pickle"),  # knows which classes a checkpoint's metadata may name
    ("src/trivet/library/functions.py", "import cloudpickle"),  # writes the user's functions for the user's own processes
}


def unpickling(source: str) -> Iterator[str]:
    """Return what in `source` pickles or unpickles."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (f"import {alias.name}" for alias in names if alias.name.split(".")[0] in PICKLING)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in PICKLING:
                yield f"import {module}"
            case ast.Attribute(attr=name) | ast.Name(id=name) | ast.alias(name=name) if name in OBJECTS:
                yield name
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load"), keywords=keywords):
                if not any(word.arg == "weights_only" and getattr(word.value, "value", None) is True for word in keywords):
                    yield "torch.load"
            case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True)):
                yield "allow_pickle"
            case _:
                pass


def test_no_source_unpickles() -> None:
    found = {(str(path.relative_to(ROOT)), what) for path in SOURCES for what in unpickling(path.read_text())}
    assert found - ALLOWED == set()
    assert len(SOURCES) > 200


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from pickle import loads",
        "import cloudpickle as c",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "dist.all_gather_object(parts, texts)",
        "from torch.distributed import gather_object",
        "socket.recv_pyobj()",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_the_scan_sees(source: str) -> None:
    assert list(unpickling(source))


def test_the_scan_lets_weights_be_loaded() -> None:
    assert not list(unpickling("torch.load(path, weights_only=True)\nnp.load(path)\njson.load(file)"))
