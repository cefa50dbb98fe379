"""Calls the functions and objects that a program passes as `callbacks`, in the program's own process.

A function is called with each step. An object may have the methods `on_step`, `on_evaluation`, `on_save` and `on_end`.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from trivet.checkpoints.commit import committed_steps
from trivet.config.layout import COMMITTED, RunLayout
from trivet.errors import ConfigError
from trivet.evaluation.scores import Summary
from trivet.library.run import Run, RunStep

_METHODS = ("on_step", "on_evaluation", "on_save", "on_end")


class StopRun:
    """Returned by a callback, as `trivet.Stop` or `trivet.Stop()`, to end the run: it finishes its step and commits it."""


class Callbacks:
    """The callbacks of one start of a run. A method returns whether one of them asked for the end of the run."""

    def __init__(self, callbacks: Sequence[Any], layout: RunLayout, *, since: float) -> None:
        """Call nothing yet. Evaluations and checkpoints from before the Unix time `since` belong to an earlier start."""
        for callback in callbacks:
            if not callable(callback) and not any(hasattr(callback, name) for name in _METHODS):
                raise ConfigError(
                    f"callbacks: {callback!r} must be a function or have one of the methods {', '.join(_METHODS)}"
                )
        self._callbacks = callbacks
        self._layout = layout
        self._since = since
        self._seen: set[Path] = set()
        """Files whose evaluation or checkpoint was reported."""

    def step(self, step: RunStep) -> bool:
        """Call functions and `on_step` with a finished step."""
        return self._call("on_step", step)

    def results(self) -> bool:
        """Call `on_evaluation` with the scores, and `on_save` with the directory, of what was evaluated and committed meanwhile."""
        summaries = self._new(new_summaries(self._layout, since=self._since))
        asked = [self._call("on_evaluation", msgspec.json.decode(file.read_bytes(), type=Summary)) for file in summaries]
        commits = [self._layout.checkpoint_step(step) for step in committed_steps(self._layout)]
        saved = self._new([path for path in commits if _modified(path / COMMITTED) >= self._since])
        asked += [self._call("on_save", directory) for directory in saved]
        return any(asked)

    def end(self, run: Run) -> None:
        """Call `on_end` with the run."""
        self._call("on_end", run)

    def _new(self, paths: Sequence[Path]) -> Iterator[Path]:
        for path in sorted(set(paths) - self._seen):
            self._seen.add(path)
            yield path

    def _call(self, method: str, value: object) -> bool:
        """Call every callback that has `method`; return whether one returned `trivet.Stop`. All are called."""
        chosen: list[Callable[[Any], object]] = []
        for callback in self._callbacks:
            has_methods = any(hasattr(callback, name) for name in _METHODS)
            if hasattr(callback, method):
                chosen.append(getattr(callback, method))
            elif method == "on_step" and not has_methods:
                chosen.append(callback)
        returned = [call(value) for call in chosen]
        return any(value is StopRun or isinstance(value, StopRun) for value in returned)


def new_summaries(layout: RunLayout, *, since: float) -> list[Path]:
    """Return the files of scores that were written since the Unix time `since`."""
    return [path for path in layout.evals.glob("step_*/**/summary.json") if _modified(path) >= since]


def _modified(path: Path) -> float:
    """Return the Unix time of a file's last change; 0 if the run has just removed it."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
