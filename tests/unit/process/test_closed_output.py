"""A command whose output has no reader ends with 141 or 0 and prints no traceback."""

import os
import subprocess
import sys
from pathlib import Path
from random import Random

import msgspec
import pytest

from support.big_run import write_run
from support.histories import RunMaker
from trivet.cli.main import main
from trivet.process.closed_output import EXIT_CODE, UNWRITABLE_EXIT_CODE, is_closed, run_until_output_closes

TOOL = (sys.executable, "-m", "trivet.cli.main")
LOGGER = """
import logging, sys
from trivet.process.closed_output import run_until_output_closes
from trivet.telemetry.logs import setup_logging

def main():
    setup_logging("trainer", level="info")
    logging.getLogger("vllm").addHandler(logging.StreamHandler(sys.stdout))
    for step in range(3):
        logging.getLogger("trivet").info("step %d", step)
        logging.getLogger("vllm").error("a line of a library's own handler")
    print("done", file=sys.stderr)
    return 0

sys.exit(run_until_output_closes(main))
"""


def run_without_reader(command: list[str], *, merge_errors: bool = False) -> tuple[int, str]:
    """Run `command` with a closed pipe as its output; return exit code and standard error."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = subprocess.run(command, stdout=writing, stderr=writing if merge_errors else subprocess.PIPE, timeout=120)
    finally:
        os.close(writing)
    return ended.returncode, "" if merge_errors else ended.stderr.decode()


def test_a_help_that_cannot_be_written_says_so() -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run([*TOOL, "--help"], stdout=full, stderr=subprocess.PIPE, timeout=120)
    assert ended.returncode == UNWRITABLE_EXIT_CODE
    assert ended.stderr.decode() == "error: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("module", ["trivet.launcher.commands.rl", "trivet.dialects.vf_rl", "trivet.cli.main"])
def test_a_help_that_nobody_reads_ends_quietly(module: str) -> None:
    """Every other command has its configuration read by `config.command`, as `rl` has."""
    code, errors = run_without_reader(
        [sys.executable, "-c", f"import sys; from {module} import main; sys.exit(main())", "--help"]
    )
    assert (errors, code in (0, EXIT_CODE)) == ("", True)


@pytest.mark.parametrize(
    ("words", "codes", "said"),
    [
        (["status", "nowhere"], (2,), "error: "),
        (["check", "RUN"], (0, 1, EXIT_CODE), ""),
    ],
)
def test_a_command_ends_quietly_when_nobody_reads_its_output_and_keeps_the_code_of_a_mistake(
    words: list[str], codes: tuple[int, ...], said: str, tmp_path: Path
) -> None:
    layout = write_run(tmp_path / "run", num_steps=2)
    made = RunMaker(Random(1), max_steps=3, max_crashes=0).run()
    layout.events.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in made))
    code, errors = run_without_reader([*TOOL, *(str(layout.root) if word == "RUN" else word for word in words)])
    assert code in codes
    assert errors.startswith(said) if said else errors == ""
    assert errors.count("\n") <= 1


def test_a_role_goes_on_without_a_reader_of_its_log() -> None:
    assert run_without_reader([sys.executable, "-c", LOGGER]) == (0, "done\n")
    code, _ = run_without_reader([sys.executable, "-c", LOGGER], merge_errors=True)
    assert code in (0, EXIT_CODE)


def test_a_broken_pipe_that_is_not_the_output_is_not_hidden_and_ctrl_c_ends_without_a_traceback() -> None:
    def fail() -> int:
        raise BrokenPipeError("a worker's pipe")

    def interrupt() -> int:
        raise KeyboardInterrupt

    with pytest.raises(BrokenPipeError, match="a worker's pipe"):
        run_until_output_closes(fail)
    assert run_until_output_closes(interrupt) == 130


def test_a_pipe_is_closed_once_its_reader_has_gone() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        assert not is_closed(stream)
        os.close(reading)
        assert is_closed(stream)


@pytest.mark.parametrize(
    ("tool", "path"), [("status", "x" * 5000), ("check", "a\0b"), ("top", "loop/x"), ("view", "loop/x"), ("merge", "loop/x")]
)
def test_a_tool_refuses_what_can_be_no_path_in_one_line(
    tool: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    assert main([tool, path, *(["out"] if tool == "merge" else [])]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ADAPTER" if tool == "merge" else "error: OUTPUT_DIR")
    assert message.count("\n") == 1
