"""Puts the files of one viewed run behind one lock, so that several requests may ask at a time."""

import threading
from pathlib import Path

from trivet.config.layout import RunLayout
from trivet.errors import ConfigError
from trivet.view.evals import RunEvals
from trivet.view.metrics import ALWAYS_READ, RunMetrics
from trivet.view.rollouts import RolloutFiles
from trivet.view.status import StatusClock
from trivet.view.timeline import NoteReader
from trivet.view.token_text import TokenText


class ViewedRun:
    """One run that is looked at."""

    def __init__(self, layout: RunLayout, *, name: str) -> None:
        self.layout, self.name = layout, name
        self.lock = threading.Lock()
        """Held by whoever uses the rest."""
        self.metrics = RunMetrics(layout)
        self.rollouts = RolloutFiles(layout)
        self.token_text = TokenText(layout)
        self.evals = RunEvals(layout)
        self.notes = NoteReader(layout)
        self.clock = StatusClock()
        """Tells the time by which the age of the run's status is judged."""

    def warm_up(self) -> None:
        """Read what the first page shows."""
        with self.lock:
            self.metrics.refresh(ALWAYS_READ)


def open_run(directory: Path) -> RunLayout:
    """Return the layout of the run in `directory`.

    Raises:
        ConfigError: the directory holds no run.
    """
    layout = RunLayout(directory)
    if not directory.is_dir():
        raise ConfigError(f"{str(directory)!r} is no directory; give a run's output_dir")
    signs = [layout.status, layout.run_file, layout.events, layout.metrics, layout.reports, layout.evals]
    if not any(path.exists() for path in signs):
        raise ConfigError(
            f"{str(directory)!r} holds no run: none of {', '.join(path.name for path in signs)} is there; give a run's output_dir"
            f"{_name_runs_below(directory)}"
        )
    return layout


def _name_runs_below(directory: Path) -> str:
    records = [path for pattern in ("*/run.json", "*/*/run.json") for path in directory.glob(pattern)]
    return f", for example {' or '.join(str(path.parent) for path in sorted(records)[:3])}" if records else ""


def name_runs(directories: list[Path]) -> list[str]:
    """Name each run by as few last parts of its path as tell the runs apart."""
    paths = [path.resolve().parts for path in directories]
    depth = 1
    while len({parts[-depth:] for parts in paths}) < len(set(paths)):
        depth += 1
    return ["/".join(parts[-depth:]).removeprefix("//") for parts in paths]
