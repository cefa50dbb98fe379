"""The check of a GPU keeps a record after each part, continues one, and stops at limits. The parts here are stand-ins."""

import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.scripts import load_script
from trivet.config.load import load_config
from trivet.config.schema.rl import RLConfig

script = load_script("gpu_check")
parts_script = sys.modules["gpu_parts"]
Outcome, Part, Record = script.Outcome, parts_script.Part, script.Record

HEAD = {"revision": "r1", "device": "cpu"}
MACHINE = parts_script.Machine(device="cpu", gpus=(), torch="2", vllm=None)


class FakeMachine:
    """Runs stand-ins for programs on a clock of its own, and remembers what was asked."""

    def __init__(self, **outcomes: tuple[int | None, float]) -> None:
        """Take each part's exit code (None: the limit ends it) and seconds; others end well after a second."""
        self.outcomes = outcomes
        self.now = 100.0
        self.ran: list[tuple[str, float]] = []

    def run(self, command: Sequence[str], limit_s: float) -> Any:
        (name,) = command
        self.ran.append((name, limit_s))
        exit_code, seconds = self.outcomes.get(name, (0, 1.0))
        if exit_code is None:
            seconds = limit_s
        self.now += seconds
        return Outcome(exit_code=exit_code, output=f'working in /secret/place\n{{"part": "{name}"}}', seconds=seconds)

    def check(self, parts: Sequence[Any], record: Any, **options: Any) -> None:
        script.check(parts, record, run=self.run, clock=lambda: self.now, **options)


def part(name: str, **options: Any) -> Any:
    return Part(**{"name": name, "command": [name], "limit_s": 60.0, "read_result": parts_script.last_json} | options)


def statuses(path: Path) -> dict[str, str]:
    return {entry["part"]: entry["status"] for entry in json.loads(path.read_text())["parts"]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "record.json"


def test_a_check_that_is_cut_off_keeps_the_parts_that_had_ended(path: Path) -> None:
    machine = FakeMachine()

    def cut_off(command: Sequence[str], limit_s: float) -> Any:
        if command == ["b"]:
            raise KeyboardInterrupt
        return machine.run(command, limit_s)

    with pytest.raises(KeyboardInterrupt):
        script.check([part("a"), part("b"), part("c")], Record(path, HEAD), run=cut_off)
    assert statuses(path) == {"a": "passed"}
    assert [entry.name for entry in path.parent.iterdir()] == ["record.json"]


def test_a_second_call_runs_what_the_first_did_not(path: Path) -> None:
    parts = [part("a"), part("b"), part("c")]
    FakeMachine().check(parts, Record(path, HEAD), only=["b"])
    assert statuses(path) == {"a": "not run", "b": "passed", "c": "not run"}
    machine = FakeMachine()
    machine.check(parts, Record(path, HEAD))
    assert [name for name, _ in machine.ran] == ["a", "c"]
    assert statuses(path) == {"a": "passed", "b": "passed", "c": "passed"}


def test_a_failing_part_is_recorded_with_its_last_lines_and_the_next_one_runs(path: Path) -> None:
    record = Record(path, HEAD)
    FakeMachine(a=(3, 1.0)).check([part("a"), part("b")], record, shorten=lambda text: text.replace("/secret", "TMP"))
    first, second = record.content["parts"]
    assert (first["status"], first["exit_code"]) == ("failed", 3)
    assert first["last_lines"][0] == "working in TMP/place"
    assert "result" not in first
    assert second == {"part": "b", "status": "passed", "seconds": 1.0, "result": {"part": "b"}}
    assert record.has_failure


def test_a_part_that_reaches_its_own_limit_is_not_run_again_but_one_that_had_less_time_is(path: Path) -> None:
    record = Record(path, HEAD)
    slow = {"a": (None, 0.0), "b": (None, 0.0)}
    FakeMachine(**slow).check([part("a"), part("b"), part("c")], record, limit_s=100.0)
    assert statuses(path) == {"a": "limit reached", "b": "limit reached", "c": "not run"}
    assert record.find("c")["reason"] == "no time was left in --limit-s"
    machine = FakeMachine()
    machine.check([part("a"), part("b"), part("c")], Record(path, HEAD))
    assert machine.ran == [("b", 60.0), ("c", 60.0)]


def test_at_the_limit_all_processes_of_a_part_end() -> None:
    started = time.monotonic()
    outcome = script.run_limited(["bash", "-c", "echo begun; sleep 600 & sleep 600"], 0.5)
    assert outcome.exit_code is None
    assert outcome.output == "begun\n"
    assert time.monotonic() - started < 10


def test_the_run_whose_server_sleeps_is_a_valid_configuration_for_one_gpu(tmp_path: Path) -> None:
    machine = parts_script.Machine(device="cuda", gpus=("H100",), torch="2", vllm="0.32")
    found = {each.name: each for each in parts_script.make_parts(machine, scratch=tmp_path, traces=tmp_path)}["sleep"]
    commands = " ".join(shlex.split(found.command[-1])).split(" && ")
    _, _, flags = commands[1].partition("trivet.launcher.commands.rl ")
    config = load_config(RLConfig, flags.split(), environ={}).config
    assert config.inference is not None
    assert config.inference.sleep_while_training
    assert (config.orchestrator.sleep_servers, config.trainer.release_gpu_memory) == (True, True)
    assert (config.max_async_level, config.inference_gpu_ids, config.trainer_gpu_ids) == (0, [0], [0])
    assert str(tmp_path / "sleep") in commands[2]
    on_cpu = {each.name: each.missing for each in parts_script.make_parts(MACHINE, scratch=tmp_path, traces=tmp_path)}
    assert on_cpu["sleep"] == "a server on the CPU has no GPU memory to free"
