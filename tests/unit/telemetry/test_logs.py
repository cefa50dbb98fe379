import json
import logging
import re
import warnings

import pytest

from trivet.launcher.logs import is_for_terminal
from trivet.telemetry.logs import SUCCESS, setup_logging, text_line


@pytest.fixture(autouse=True)
def restored_logging():
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    root.handlers.clear()
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def test_a_line_has_time_role_level_and_message_on_stdout_and_in_the_file(tmp_path, capsys):
    path = tmp_path / "logs" / "trainer.log"
    setup_logging("trainer", level="info", file=path)
    logging.getLogger("trivet.x").info("policy published version=%d", 3)
    logging.getLogger("trivet.x").log(SUCCESS, "Step 7 | Time: 1.99s")
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d trainer INFO policy published version=3", first)
    assert re.fullmatch(r"\d\d:\d\d:\d\d trainer SUCCESS Step 7 \| Time: 1.99s", second)
    assert path.read_text().splitlines() == [first, second]


def test_level_and_noisy_libraries(capsys):
    setup_logging("eval", level="warning")
    logging.getLogger("trivet").info("quiet")
    setup_logging("eval", level="debug")
    logging.getLogger("trivet").debug("loud")
    logging.getLogger("httpx").info("HTTP Request")
    logging.getLogger("httpx").warning("connection lost")
    assert [line.split(" ", 2)[2] for line in capsys.readouterr().out.splitlines()] == ["DEBUG loud", "WARNING connection lost"]


def test_setting_up_twice_writes_each_line_once_and_pythons_warnings_too(capsys):
    for _ in range(2):
        setup_logging("a%b", level="info")
    logging.getLogger("trivet").info("once")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("deprecated thing", stacklevel=1)
    output = capsys.readouterr().out
    assert output.count("a%b INFO once") == 1
    assert "a%b WARNING" in output


def test_a_line_may_be_one_json_object(capsys, tmp_path):
    path = tmp_path / "rank.stdout"
    setup_logging("trainer", level="info", file=path, as_json=True)
    logging.getLogger("trivet.x").info("two\nlines of %s", "ä")
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("trivet.x").exception("it failed")
    plain, failed = map(json.loads, capsys.readouterr().out.splitlines())
    assert plain.pop("time").endswith("+00:00")
    assert plain == {"level": "INFO", "role": "trainer", "logger": "trivet.x", "message": "two\nlines of ä"}
    assert failed["error"].endswith("ValueError: no")
    assert len(path.read_text().splitlines()) == 2


def test_the_launcher_finds_json_lines_for_the_terminal_and_reads_them_as_text(capsys):
    setup_logging("trainer", level="info", as_json=True)
    logging.getLogger("trivet").log(SUCCESS, "Step 7 | Time: 1.99s")
    logging.getLogger("trivet").info("ERROR is only a word here")
    success, info = capsys.readouterr().out.splitlines()
    assert (is_for_terminal(success), is_for_terminal(info)) == (True, False)
    assert re.fullmatch(r"\d\d:\d\d:\d\d trainer SUCCESS Step 7 \| Time: 1.99s", text_line(success))
    for line in ('{"level": "INFO"}', "12:00:00 rl inference ready"):
        assert text_line(line) == line
