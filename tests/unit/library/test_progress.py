"""What is shown of a run's progress depends on where it is shown."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from trivet.library.trainers import shown_progress


class Notebook:
    """IPython's display, as a notebook has it: every state that was shown."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def display(self, data: dict[str, str], *, raw: bool, display_id: bool) -> "Notebook":
        assert display_id
        self.update(data, raw=raw)
        return self

    def update(self, data: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.shown.append(data["text/plain"])


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    found = Notebook()
    ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    display.display = found.display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return found


@pytest.mark.parametrize(("max_steps", "total"), [(10, "/10"), (None, "")])
def test_a_notebook_has_one_output_with_the_last_state(notebook: Notebook, max_steps: int | None, total: str) -> None:
    with shown_progress(max_steps, is_wanted=True) as show:
        show(0, "starting")
        show(3, "reward=0.5")
        show(3, "reward=0.5")
    assert notebook.shown == ["starting", f"step 0{total}: starting", f"step 3{total}: reward=0.5"]


def test_a_terminal_has_a_bar_below_what_the_program_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with shown_progress(10, is_wanted=True) as show:
        show(3, "reward=0.5")
        print("a line of the program")
    printed = capsys.readouterr().out
    assert "3/10" in printed
    assert "reward=0.5" in printed
    assert "a line of the program\n" in printed


def test_a_file_gets_nothing_and_nobody_who_does_not_want_it(capsys: pytest.CaptureFixture[str], notebook: Notebook) -> None:
    with shown_progress(10, is_wanted=False) as show:
        show(3, "reward=0.5")
    assert (notebook.shown, capsys.readouterr().out) == ([], "")
    sys.modules.pop("IPython")
    with shown_progress(10, is_wanted=True) as show:
        show(3, "reward=0.5")
    assert capsys.readouterr().out == ""
