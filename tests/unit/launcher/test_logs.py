import errno
import io
import json
from pathlib import Path

import pytest

from trivet.launcher.logs import LogFollower, RunLog, is_for_terminal, last_lines, quote_log
from trivet.telemetry.logs import text_line


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


def test_the_last_lines_are_those_of_this_attempt(tmp_path: Path) -> None:
    path = tmp_path / "trainer.stdout"
    path.write_text("old\n")
    offset = path.stat().st_size
    assert last_lines(path, offset=offset) == []
    with path.open("a") as file:
        file.writelines(f"line {index}\n" for index in range(30))
    assert last_lines(path, offset=offset) == [f"line {index}" for index in range(10, 30)]


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
    log.show("a step")
    disk.is_full = terminal.is_full = False
    log.show("another")
    assert disk.getvalue() == terminal.getvalue() == "a step\nanother\n"


def test_with_json_the_launchers_lines_are_objects_that_read_as_text(tmp_path: Path) -> None:
    terminal = io.StringIO()
    with (tmp_path / "rl.log").open("w") as file:
        log = RunLog(terminal, file, as_json=True)
        log.say("inference ready url=x")
    (line,) = terminal.getvalue().splitlines()
    assert json.loads(line)["role"] == "rl"
    assert text_line(line).endswith(" rl inference ready url=x")


def test_a_log_is_quoted_from_this_attempt_on(tmp_path: Path) -> None:
    log = tmp_path / "trainer.stdout"
    log.write_text("old\nnew\n")
    assert quote_log(log, offset=4) == f"last lines of {log}:\n  | new\nfull log: {log}"
    assert "(it wrote nothing)" in quote_log(log, offset=8)
