"""Shows how far a run is: a bar in a terminal, one line of a notebook's output, nothing where output goes to a file."""

import html
import sys
from types import TracebackType
from typing import Any, Protocol

from trivet.launcher.terminal import make_progress


class ProgressBar(Protocol):
    """Shows one run. Used as a context manager, which takes the bar away or leaves its last state."""

    def update(self, step: int, *, doing: str) -> None:
        """Show the last finished step, and what the run does or measured."""
        ...

    def __enter__(self) -> "ProgressBar": ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


def open_progress(max_steps: int | None, *, is_wanted: bool) -> ProgressBar:
    """Return what shows the progress here.

    Args:
        max_steps: None for a run whose number of steps is not known.
    """
    if not is_wanted:
        return _NoBar()
    notebook = _find_display()
    if notebook is not None:
        return _NotebookBar(notebook, max_steps)
    return _TerminalBar(max_steps) if sys.stdout.isatty() else _NoBar()


def _find_display() -> Any:
    """Return IPython's function `display` in a notebook, None elsewhere. IPython is imported only where it runs already."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or not hasattr(shell, "kernel"):  # a shell in a terminal has no kernel
        return None
    from IPython.display import display  # type: ignore[import-not-found]  # no dependency: whoever runs a notebook has it

    return display


class _NoBar:
    def update(self, step: int, *, doing: str) -> None:
        pass

    def __enter__(self) -> "_NoBar":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass


class _TerminalBar(_NoBar):
    """A bar below what the program prints."""

    def __init__(self, max_steps: int | None) -> None:
        self._progress = make_progress(sys.stdout, follows_prints=True)
        self._task = self._progress.add_task("", total=max_steps, doing="starting")

    def update(self, step: int, *, doing: str) -> None:
        self._progress.update(self._task, completed=step, doing=doing)

    def __enter__(self) -> "_TerminalBar":
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()


class _NotebookBar(_NoBar):
    """One output of a cell, which is replaced by each update and keeps the last state."""

    def __init__(self, display: Any, max_steps: int | None) -> None:
        self._display = display
        self._handle: Any = None
        self._max_steps = max_steps
        self._step = 0
        self._doing = "starting"

    def update(self, step: int, *, doing: str) -> None:
        if (step, doing) != (self._step, self._doing):
            self._step, self._doing = step, doing
            self._handle.update(self)

    def __enter__(self) -> "_NotebookBar":
        self._handle = self._display(self, display_id=True)
        return self

    def __repr__(self) -> str:
        of = "" if self._max_steps is None else f"/{self._max_steps}"
        return f"step {self._step}{of}: {self._doing}"

    def _repr_html_(self) -> str:
        bounds = "" if self._max_steps is None else f' value="{self._step}" max="{self._max_steps}"'
        return f"<progress{bounds}></progress> {html.escape(repr(self))}"
