"""What integration tests share."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.rl_run import CONFIG, Run

MakeRun = Callable[..., Run]


@pytest.fixture
def make_run(tmp_path: Path, tiny_model: Path) -> Iterator[MakeRun]:
    """Make runs of `rl` in directories of the test, which end with it."""
    with ExitStack() as stack:

        def make(name: str = "", *, max_steps: int, model: Path = tiny_model, template: str = CONFIG) -> Run:
            run = Run(tmp_path / name, model, max_steps=max_steps, template=template)
            stack.callback(run.stop)
            return run

        yield make
