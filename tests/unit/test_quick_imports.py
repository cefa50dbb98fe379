import gc
import os

import pytest

from trivet.process.imports import import_by_path, without_collections


def test_collections_pause_for_the_imports_alone() -> None:
    with without_collections():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_import_that_fails_leaves_collections_on() -> None:
    with pytest.raises(ImportError, match="no_such_library"), without_collections():
        import no_such_library  # type: ignore[import-not-found]  # noqa: F401

    assert gc.isenabled()


def test_what_was_off_stays_off() -> None:
    gc.disable()
    try:
        with without_collections():
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
