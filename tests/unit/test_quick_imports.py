import gc

import pytest

from trivet.imports import without_collections


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
