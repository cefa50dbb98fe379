"""What integration tests share. One that is not marked core is slow: the default suite has a few, which share one server."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.rl_run import CONFIG, Run

MakeRun = Callable[..., Run]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("core") is None:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def make_run(tmp_path: Path, tiny_model: Path) -> Iterator[MakeRun]:
    """Make runs of `rl` in directories of the test, which end with it."""
    with ExitStack() as stack:

        def make(name: str = "", *, max_steps: int, model: Path = tiny_model, template: str = CONFIG) -> Run:
            run = Run(tmp_path / name, model, max_steps=max_steps, template=template)
            stack.callback(run.stop)
            return run

        yield make
