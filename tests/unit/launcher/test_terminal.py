import contextlib
import io
import os
import pty
from collections.abc import Callable

from trivet.launcher.terminal import Terminal, describe_activity, finished_step
from trivet.wire.status import ProcessReport, RoleState, RoleStatus, RunState, RunStatus
from trivet.wire.versions import Step

STEP_LINE = "12:00:00 trainer SUCCESS Step 3 | Time: 1.99s | Loss: [0.0123] " + "x" * 200


def on_a_terminal(use: Callable[[Terminal], None]) -> str:
    """Return what a terminal receives while `use` runs. It fits into the kernel's buffer."""
    ours, theirs = pty.openpty()
    seen = bytearray()
    try:
        with os.fdopen(theirs, "w") as file:
            use(Terminal(file))
        with contextlib.suppress(OSError):  # how the end of a terminal whose other side is closed is told
            while part := os.read(ours, 1 << 16):
                seen += part
    finally:
        os.close(ours)
    return seen.decode()


def test_lines_in_a_file_stay_lines_and_progress_leaves_nothing() -> None:
    file = io.StringIO()
    terminal = Terminal(file)
    terminal.show_progress(step=3, max_steps=100, doing="training step 4")
    terminal.print(STEP_LINE)
    terminal.close()
    assert file.getvalue() == STEP_LINE + "\n"


def test_a_terminal_shows_a_bar_below_whole_lines() -> None:
    def use(terminal: Terminal) -> None:
        terminal.show_progress(step=3, max_steps=100, doing="waits for batch 4")
        terminal.print(STEP_LINE)
        terminal.show_progress(step=4, max_steps=100, doing="training step 5")

    seen = on_a_terminal(use)
    assert "3/100" in seen
    assert "waits for batch 4" in seen
    assert STEP_LINE in seen.replace("\r\n", "\n")
    assert seen.index("4/100") > seen.index(STEP_LINE)


def test_once_closed_a_terminal_gets_plain_lines() -> None:
    def use(terminal: Terminal) -> None:
        terminal.show_progress(step=3, max_steps=None, doing="")
        terminal.close()
        terminal.close()
        terminal.print("done")

    assert on_a_terminal(use).endswith("done\r\n")


def _status(*reports: ProcessReport) -> RunStatus:
    roles = [RoleStatus(name=report.role, state=RoleState.RUNNING, pid=1, reports=[report]) for report in reports]
    return RunStatus(run_id="r", attempt=1, pid=1, state=RunState.RUNNING, started=0.0, time=0.0, roles=roles)


def _report(role: str, activity: str, *, step: int = 0, waits_for: str = "") -> ProcessReport:
    return ProcessReport(role=role, pid=1, time=0.0, since=0.0, activity=activity, step=Step(step), waits_for=waits_for)


def test_the_words_name_what_the_run_hangs_on() -> None:
    filling = _report("orchestrator", "filling batch 12")
    assert describe_activity(_status()) == "starting"
    assert describe_activity(_status(filling)) == "filling batch 12"
    assert describe_activity(_status(filling, _report("trainer", "training step 11"))) == "training step 11"
    waiting = _report("trainer", "batch 12", waits_for="orchestrator")
    assert describe_activity(_status(filling, waiting)) == "waits for batch 12 (filling batch 12)"


def test_the_finished_step_is_the_trainers() -> None:
    assert finished_step(_status()) == 0
    assert finished_step(_status(_report("orchestrator", "", step=9), _report("trainer", "", step=7))) == 7
