"""What is shown of a run's progress depends on where it is shown."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trivet.library.trainers import ProgressBar


class Notebook:
    """IPython's display, as a notebook has it: every state that was shown."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def display(self, bar: Any, *, display_id: bool) -> "Notebook":
        assert display_id
        self.update(bar)
        return self

    def update(self, bar: Any) -> None:
        self.shown.append(bar._repr_html_())


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    found = Notebook()
    ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    display.display = found.display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return found


def test_a_notebook_has_one_output_with_the_last_state(notebook: Notebook) -> None:
    with ProgressBar(10, is_wanted=True) as bar:
        bar.update(0, activity="starting")
        bar.update(3, activity="reward=<0.5>")
        bar.update(3, activity="reward=<0.5>")
    assert notebook.shown == [
        '<progress value="0" max="10"></progress> step 0/10: starting',
        '<progress value="3" max="10"></progress> step 3/10: reward=&lt;0.5&gt;',
    ]


def test_a_run_of_unknown_length_has_a_bar_without_an_end(notebook: Notebook) -> None:
    with ProgressBar(None, is_wanted=True) as bar:
        bar.update(4, activity="evaluating")
    assert notebook.shown[-1] == "<progress></progress> step 4: evaluating"


def test_a_terminal_has_a_bar_below_what_the_program_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with ProgressBar(10, is_wanted=True) as bar:
        bar.update(3, activity="reward=0.5")
        print("a line of the program")
    printed = capsys.readouterr().out
    assert "3/10" in printed
    assert "reward=0.5" in printed
    assert "a line of the program\n" in printed


def test_a_file_gets_nothing_and_nobody_who_does_not_want_it(capsys: pytest.CaptureFixture[str], notebook: Notebook) -> None:
    with ProgressBar(10, is_wanted=False) as bar:
        bar.update(3, activity="reward=0.5")
    assert (notebook.shown, capsys.readouterr().out) == ([], "")
    sys.modules.pop("IPython")
    with ProgressBar(10, is_wanted=True) as bar:
        bar.update(3, activity="reward=0.5")
    assert capsys.readouterr().out == ""
