import contextlib
import errno
import io
import json
import os
import pty
from collections.abc import Callable
from pathlib import Path

import pytest

from trivet.launcher.logs import (
    LogFollower,
    RunLog,
    describe_activity,
    finished_step,
    is_for_terminal,
    last_lines,
    quote_log,
)
from trivet.telemetry.logs import text_line
from trivet.wire.status import ProcessReport, RoleState, RoleStatus, RunState, RunStatus
from trivet.wire.versions import Step


def test_only_whole_lines_are_given_and_each_once(tmp_path: Path) -> None:
    path = tmp_path / "trainer.stdout"
    follower = LogFollower(path, offset=0)
    assert follower.read_lines() == []
    path.write_bytes(b"one\ntw")
    assert follower.read_lines() == ["one"]
    with path.open("ab") as file:
        file.write(b"o\n\xff\n")
    assert follower.read_lines() == ["two", "�"]
    assert follower.read_lines() == []


def test_the_last_lines_are_those_of_this_attempt_and_quoted_with_the_place_of_the_whole_log(tmp_path: Path) -> None:
    path = tmp_path / "trainer.stdout"
    path.write_text("old\n")
    offset = path.stat().st_size
    assert last_lines(path, offset=offset) == []
    assert "(it wrote nothing)" in quote_log(path, offset=offset)
    with path.open("a") as file:
        file.writelines(f"line {index}\n" for index in range(30))
    assert last_lines(path, offset=offset) == [f"line {index}" for index in range(10, 30)]
    quoted = quote_log(path, offset=offset)
    assert quoted.startswith(f"last lines of {path}:\n  | line 10\n")
    assert quoted.endswith(f"  | line 29\nfull log: {path}")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("12:00:00 trainer SUCCESS Step 7 | Time: 1.99s | Loss: 0.0123", True),
        ("12:00:00 trainer WARNING weights are old", True),
        ("12:00:00 trainer INFO loaded", False),
        ("UserWarning: deprecated", False),
        ("12:00:00 trainer INFO a long line about something else, which happens to say ERROR", False),
    ],
)
def test_step_lines_and_warnings_reach_the_terminal(line: str, expected: bool) -> None:
    assert is_for_terminal(line) is expected


class ClosedTerminal(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_closed_terminal_does_not_stop_the_run() -> None:
    file = io.StringIO()
    log = RunLog(ClosedTerminal(), file, now=lambda: "12:00:00")
    log.say("one\ntwo")
    assert file.getvalue() == "12:00:00 rl one\n12:00:00 rl two\n"


def test_a_full_disk_does_not_end_the_launcher_and_what_it_said_is_written_when_there_is_room():
    class Disk(io.StringIO):
        is_full = True

        def flush(self) -> None:
            if self.is_full:
                raise OSError(errno.ENOSPC, "No space left on device")

    disk, terminal = Disk(), Disk()  # what it prints goes to a file too
    log = RunLog(terminal, disk)
    log.write_line("a step")
    disk.is_full = terminal.is_full = False
    log.write_line("another")
    assert disk.getvalue() == terminal.getvalue() == "a step\nanother\n"


def test_with_json_the_launchers_lines_are_objects_that_read_as_text(tmp_path: Path) -> None:
    terminal = io.StringIO()
    with (tmp_path / "rl.log").open("w") as file:
        log = RunLog(terminal, file, as_json=True)
        log.say("inference ready url=x")
    (line,) = terminal.getvalue().splitlines()
    assert json.loads(line)["role"] == "rl"
    assert text_line(line).endswith(" rl inference ready url=x")


STEP_LINE = "12:00:00 trainer SUCCESS Step 3 | Time: 1.99s | Loss: [0.0123] " + "x" * 200


def on_a_terminal(use: Callable[[RunLog], None]) -> str:
    """Return what a terminal receives while `use` runs. It fits into the kernel's buffer."""
    ours, theirs = pty.openpty()
    seen = bytearray()
    try:
        with os.fdopen(theirs, "w") as file:
            use(RunLog(file, io.StringIO()))
        with contextlib.suppress(OSError):  # how the end of a terminal whose other side is closed is told
            while part := os.read(ours, 1 << 16):
                seen += part
    finally:
        os.close(ours)
    return seen.decode()


def test_lines_in_a_file_stay_lines_and_progress_leaves_nothing() -> None:
    terminal = io.StringIO()
    log = RunLog(terminal, io.StringIO())
    log.show_progress(step=3, max_steps=100, activity="training step 4")
    log.write_line(STEP_LINE)
    log.close()
    assert terminal.getvalue() == STEP_LINE + "\n"


def test_a_terminal_shows_a_bar_below_whole_lines_until_it_is_closed() -> None:
    def use(log: RunLog) -> None:
        log.show_progress(step=3, max_steps=100, activity="waits for batch 4")
        log.write_line(STEP_LINE)
        log.show_progress(step=4, max_steps=100, activity="training step 5")
        log.close()
        log.close()
        log.write_line("done")

    seen = on_a_terminal(use)
    assert "3/100" in seen
    assert "waits for batch 4" in seen
    assert STEP_LINE in seen.replace("\r\n", "\n")
    assert seen.index("4/100") > seen.index(STEP_LINE)
    assert seen.endswith("done\r\n")


def _status(*reports: ProcessReport) -> RunStatus:
    roles = [RoleStatus(name=report.role, state=RoleState.RUNNING, pid=1, reports=[report]) for report in reports]
    return RunStatus(run_id="r", attempt=1, pid=1, state=RunState.RUNNING, started=0.0, time=0.0, roles=roles)


def _report(role: str, activity: str, *, step: int = 0, waits_for: str = "") -> ProcessReport:
    return ProcessReport(role=role, pid=1, time=0.0, since=0.0, activity=activity, step=Step(step), waits_for=waits_for)


def test_the_words_name_what_the_run_hangs_on_and_the_step_is_the_trainers() -> None:
    filling = _report("orchestrator", "filling batch 12", step=9)
    assert describe_activity(_status()) == "starting"
    assert describe_activity(_status(filling)) == "filling batch 12"
    assert describe_activity(_status(filling, _report("trainer", "training step 11"))) == "training step 11"
    waiting = _report("trainer", "batch 12", waits_for="orchestrator", step=7)
    assert describe_activity(_status(filling, waiting)) == "waits for batch 12 (filling batch 12)"
    assert (finished_step(_status()), finished_step(_status(filling, waiting))) == (0, 7)
