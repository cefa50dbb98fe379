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

COMMANDS = {
    "rl": "trivet.launcher.commands.rl",
    "sft": "trivet.launcher.commands.sft",
    "vf-rl": "trivet.dialects.vf_rl",
    "eval": "trivet.evaluation.main",
    "inference": "trivet.inference.main",
    "orchestrator": "trivet.orchestrator.main",
    "trainer": "trivet.launcher.commands.trainer",
    "trivet": "trivet.cli.main",
}
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


def run_on_full_device(command: list[str]) -> tuple[int, str]:
    """Run `command` with a full device as its output; return exit code and standard error."""
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=120)
    return ended.returncode, ended.stderr.decode()


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_ends_quietly_when_nobody_reads_it(command: str) -> None:
    code, errors = run_without_reader(
        [sys.executable, "-c", f"import sys; from {COMMANDS[command]} import main; sys.exit(main())", "--help"]
    )
    assert errors == ""
    assert code in (0, EXIT_CODE)


@pytest.mark.parametrize("arguments", [["status", "--help"], ["doctor"], ["status", "nowhere"]])
def test_a_tool_ends_quietly_when_nobody_reads_its_output(arguments: list[str], tmp_path: Path) -> None:
    code, errors = run_without_reader([sys.executable, "-m", "trivet.cli.main", *arguments])
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors
    assert code in ((2,) if "nowhere" in arguments else (0, EXIT_CODE))


def test_a_dry_run_ends_quietly_when_nobody_reads_it() -> None:
    code, errors = run_without_reader([sys.executable, "-m", "trivet.trainer.main", "--dry-run"])
    assert errors == ""
    assert code in (0, EXIT_CODE)


def test_a_refused_configuration_keeps_its_exit_code_although_nobody_reads_its_output() -> None:
    code, errors = run_without_reader([sys.executable, "-m", "trivet.trainer.main", "--max-steps", "x"])
    assert code == 2
    assert errors.startswith("error: max_steps must be a whole number")


def test_a_role_goes_on_without_a_reader_of_its_log() -> None:
    assert run_without_reader([sys.executable, "-c", LOGGER]) == (0, "done\n")
    code, _ = run_without_reader([sys.executable, "-c", LOGGER], merge_errors=True)
    assert code in (0, EXIT_CODE)


def test_a_broken_pipe_that_is_not_the_output_is_not_hidden() -> None:
    def fail() -> int:
        raise BrokenPipeError("a worker's pipe")

    with pytest.raises(BrokenPipeError, match="a worker's pipe"):
        run_until_output_closes(fail)


def test_a_pipe_is_closed_once_its_reader_has_gone() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        assert not is_closed(stream)
        os.close(reading)
        assert is_closed(stream)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_says_when_it_cannot_be_written(command: str) -> None:
    code, errors = run_on_full_device(
        [sys.executable, "-c", f"import sys; from {COMMANDS[command]} import main; sys.exit(main())", "--help"]
    )
    assert code == UNWRITABLE_EXIT_CODE
    assert errors == "error: the output cannot be written: No space left on device\n"


def test_a_tool_says_when_its_output_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").touch()
    code, errors = run_on_full_device([sys.executable, "-m", "trivet.cli.main", "check", str(tmp_path)])
    assert code == UNWRITABLE_EXIT_CODE
    assert errors == "error: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("arguments", [["check", "RUN"], ["status", "RUN"]])
def test_a_tool_that_reads_a_run_ends_quietly_when_nobody_reads_it(arguments: list[str], tmp_path: Path) -> None:
    layout = write_run(tmp_path / "run", num_steps=2)
    made = RunMaker(Random(1), max_steps=3, max_crashes=0).run()
    layout.events.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in made))
    words = [str(layout.root) if word == "RUN" else word for word in arguments]
    code, errors = run_without_reader([sys.executable, "-m", "trivet.cli.main", *words])
    assert errors == ""
    assert code in (0, 1, EXIT_CODE)


@pytest.mark.parametrize("path", ["x" * 5000, "a\0b", "loop/x"])
@pytest.mark.parametrize("tool", ["status", "check", "top", "view", "merge"])
def test_a_tool_refuses_what_can_be_no_path_in_one_line(
    tool: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    assert main([tool, path, *(["out"] if tool == "merge" else [])]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ADAPTER" if tool == "merge" else "error: OUTPUT_DIR")
    assert said.count("\n") == 1


@pytest.mark.parametrize("host", ["a..b", "\u00fc" * 70])
def test_the_page_refuses_what_can_be_no_host_in_one_line(
    host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", num_steps=2)
    assert main(["view", str(tmp_path / "run"), "--host", host]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: cannot listen on --host")
    assert said.count("\n") == 1
