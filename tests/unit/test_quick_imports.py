import gc
import os
import sys
from pathlib import Path

import pytest

from trivet.process.imports import file_of, import_by_path, importing


def test_collections_pause_for_the_imports_alone() -> None:
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_import_that_fails_leaves_collections_on() -> None:
    with pytest.raises(ImportError, match="no_such_library"), importing():
        import no_such_library  # type: ignore[import-not-found]  # noqa: F401

    assert gc.isenabled()


def test_what_was_off_stays_off() -> None:
    gc.disable()
    try:
        with importing():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("path", ["os.path.join", "os.path:join"])
def test_a_path_names_a_module_and_what_is_in_it(path: str) -> None:
    assert import_by_path(path) is os.path.join


@pytest.mark.parametrize(
    ("path", "error"), [("no_such_library.name", ImportError), ("os.no_such_name", AttributeError), ("name", ValueError)]
)
def test_a_path_that_leads_nowhere_says_where_it_ends(path: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        import_by_path(path)


@pytest.fixture
def search_path(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    return sys.path


def test_a_file_is_imported_once_and_stands_in_for_no_module(tmp_path: Path, search_path: list[str]) -> None:
    (tmp_path / "json.py").write_text(
        "import helper_of_the_file as helper\nimport os\n\n\ndef f():\n    return os, helper.VALUE\n"
    )
    (tmp_path / "helper_of_the_file.py").write_text("VALUE = 5\n")
    (tmp_path / "os.py").write_text("raise AssertionError('this is not the module os')\n")
    path = f"{tmp_path}/json.py:f"
    assert import_by_path(path)() == (os, 5)
    assert import_by_path(path) is import_by_path(path)
    assert search_path[-1] == str(tmp_path)
    assert sys.modules["json"].__file__ != str(tmp_path / "json.py")


def test_a_file_of_a_package_has_its_relative_imports(tmp_path: Path, search_path: list[str]) -> None:
    package = tmp_path / "package_of_a_user" / "inner"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "losses.py").write_text("from ..numbers import VALUE\n\n\ndef f():\n    return VALUE\n")
    (package.parent / "numbers.py").write_text("VALUE = 5\n")
    assert import_by_path(f"{package}/losses.py:f")() == 5
    assert "package_of_a_user.inner.losses" in sys.modules


def test_a_package_of_another_ones_name_is_refused(tmp_path: Path, search_path: list[str]) -> None:
    (tmp_path / "email").mkdir()
    for name in ("__init__.py", "utils.py"):
        (tmp_path / "email" / name).write_text("def f(): ...\n")
    with pytest.raises(ImportError, match="is another of that name; rename one"):
        import_by_path(f"{tmp_path}/email/utils.py:f")


def test_a_file_that_fails_is_run_again_when_it_was_mended(tmp_path: Path, search_path: list[str]) -> None:
    file = tmp_path / "mended.py"
    with pytest.raises(ImportError, match="there is no file"):
        import_by_path(f"{file}:f")
    file.write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        import_by_path(f"{file}:f")
    file.write_text("def f():\n    return 'it works'\n")
    assert import_by_path(f"{file}:f")() == "it works"


def test_a_path_in_a_file_is_told_from_a_module() -> None:
    assert file_of("a/b.py:f") is not None
    assert file_of("a.py.f") is None
    assert file_of("a.b:f") is None
    assert file_of("/a b/c:d.py:f") == Path("/a b/c:d.py")
    assert file_of("os.path:join") is None
