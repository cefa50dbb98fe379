"""Marks every integration test as slow that is not marked core: the default suite has a few that share one server."""

from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("core") is None:
            item.add_marker(pytest.mark.slow)
