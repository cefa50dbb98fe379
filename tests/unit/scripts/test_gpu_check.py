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
from trivet.config.schema.trainer import TrainerConfig

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


@pytest.mark.parametrize("other", [{"revision": "r2"}, {"device": "cuda"}, {"gpus": ["H200"]}])
def test_a_record_of_other_files_or_another_device_is_kept_beside_a_new_one(path: Path, other: dict[str, str]) -> None:
    FakeMachine().check([part("a")], Record(path, HEAD))
    machine = FakeMachine()
    machine.check([part("a")], Record(path, HEAD | other))
    assert machine.ran == [("a", 60.0)]
    assert statuses(path.with_name("record.old.json")) == {"a": "passed"}


def test_a_file_that_is_no_record_is_replaced(path: Path) -> None:
    path.write_text('{"parts": [')
    FakeMachine().check([part("a")], Record(path, HEAD))
    assert statuses(path) == {"a": "passed"}


def test_a_failing_part_is_recorded_with_its_last_lines_and_the_next_one_runs(path: Path) -> None:
    record = Record(path, HEAD)
    FakeMachine(a=(3, 1.0)).check([part("a"), part("b")], record, shorten=lambda text: text.replace("/secret", "TMP"))
    first, second = record.content["parts"]
    assert (first["status"], first["exit_code"]) == ("failed", 3)
    assert first["last_lines"][0] == "working in TMP/place"
    assert "result" not in first
    assert second == {"part": "b", "status": "passed", "seconds": 1.0, "result": {"part": "b"}}
    assert record.has_failure


def test_failed_parts_are_run_again_only_when_asked_for(path: Path) -> None:
    FakeMachine(a=(3, 1.0)).check([part("a")], Record(path, HEAD))
    machine = FakeMachine()
    machine.check([part("a")], Record(path, HEAD))
    assert machine.ran == []
    record = Record(path, HEAD)
    machine.check([part("a")], record, retries_failed=True)
    assert statuses(path) == {"a": "passed"}
    assert not record.has_failure


def test_a_part_may_have_other_good_exit_codes_and_a_result_when_it_fails(path: Path) -> None:
    record = Record(path, HEAD)
    FakeMachine(a=(1, 1.0), b=(1, 1.0)).check([part("a", good_codes=(0, 1)), part("b", keeps_result=True)], record)
    first, second = record.content["parts"]
    assert first["status"] == "passed"
    assert (second["status"], second["result"]) == ("failed", {"part": "b"})


def test_a_part_that_reaches_its_own_limit_is_not_run_again_but_one_that_had_less_time_is(path: Path) -> None:
    record = Record(path, HEAD)
    slow = {"a": (None, 0.0), "b": (None, 0.0)}
    FakeMachine(**slow).check([part("a"), part("b"), part("c")], record, limit_s=100.0)
    assert statuses(path) == {"a": "limit reached", "b": "limit reached", "c": "not run"}
    assert record.find("c")["reason"] == "no time was left in --limit-s"
    machine = FakeMachine()
    machine.check([part("a"), part("b"), part("c")], Record(path, HEAD))
    assert machine.ran == [("b", 60.0), ("c", 60.0)]


def test_what_the_machine_lacks_is_recorded_with_the_reason_and_asked_again(path: Path) -> None:
    record = Record(path, HEAD)
    FakeMachine().check([part("a", missing="no vLLM is installed")], record)
    assert record.content["parts"] == [{"part": "a", "status": "not run", "reason": "no vLLM is installed"}]
    assert not record.has_failure
    FakeMachine().check([part("a")], Record(path, HEAD))
    assert statuses(path) == {"a": "passed"}


def test_at_the_limit_all_processes_of_a_part_end() -> None:
    started = time.monotonic()
    outcome = script.run_limited(["bash", "-c", "echo begun; sleep 600 & sleep 600"], 0.5)
    assert outcome.exit_code is None
    assert outcome.output == "begun\n"
    assert time.monotonic() - started < 10


def test_the_exit_code_and_everything_that_was_said_come_back() -> None:
    outcome = script.run_limited(["bash", "-c", "echo out; echo err >&2; exit 7"], 60)
    assert (outcome.exit_code, outcome.output) == (7, "out\nerr\n")


def test_a_record_names_no_directory_of_the_machine() -> None:
    shorten = script.make_shortener()
    said = shorten(f"{parts_script.ROOT}/src {sys.prefix}/bin {Path.home()}/x")
    assert "CHECKOUT/src PYTHON/bin" in said
    assert str(Path.home()) not in said


def test_the_revision_is_of_content_and_changes_with_a_program(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    program = tmp_path / "src" / "a.py"
    program.write_text("1")
    first = script.revision_of(tmp_path)
    (tmp_path / "src" / "a.pyc").write_text("2")
    assert script.revision_of(tmp_path) == first
    program.write_text("2")
    assert script.revision_of(tmp_path) != first


def test_every_part_says_why_it_cannot_run_here(tmp_path: Path) -> None:
    on_cpu = {each.name: each for each in parts_script.make_parts(MACHINE, scratch=tmp_path, traces=tmp_path)}
    assert on_cpu["quickstart"].missing == "no vLLM for cpu is installed"
    assert on_cpu["row-rl-full-16384"].missing is None
    assert on_cpu["row-rl-lora-4b-65536"].missing == "with small shapes it is the same as row-rl-lora-16384"
    assert "--shape" in on_cpu["row-rl-full-16384"].command
    assert on_cpu["row-rl-full-65536-keep"].missing == "with small shapes it is the same as row-rl-full-16384-keep"
    no_gpu = parts_script.Machine(device="cuda", gpus=(), torch="2", vllm="0.32")
    missing = {each.name: each.missing for each in parts_script.make_parts(no_gpu, scratch=tmp_path, traces=tmp_path)}
    assert missing.pop("doctor") is None
    assert set(missing.values()) == {"torch sees no CUDA device"}
    one_gpu = parts_script.Machine(device="cuda", gpus=("H100",), torch="2", vllm="0.32")
    on_one = {each.name: each for each in parts_script.make_parts(one_gpu, scratch=tmp_path, traces=tmp_path)}
    assert on_one["tensor-parallel"].missing == "needs two GPUs, there are 1"
    assert "--shape" not in on_one["row-rl-full-16384"].command
    assert list(on_one) == list(on_cpu)


@pytest.mark.parametrize("row", ["row-rl-full-16384-keep", "row-rl-full-65536-keep"])
def test_a_row_that_keeps_the_outputs_of_attention_stands_behind_the_one_that_does_not(row: str, tmp_path: Path) -> None:
    machine = parts_script.Machine(device="cuda", gpus=("H100",), torch="2", vllm=None)
    parts = parts_script.make_parts(machine, scratch=tmp_path, traces=tmp_path)
    names = [each.name for each in parts]
    assert names.index(row) == names.index(row.removesuffix("-keep")) + 1
    rows = load_script("bench/gpu_rows")
    command = list(parts[names.index(row)].command)
    case = next(each for each in rows.CASES if each.name == command[command.index("--only") + 1])
    flags = rows.case_flags(
        case, directory=tmp_path, output_json=tmp_path, is_cuda=True, extra=command[command.index("--") + 1 :]
    )
    config = load_config(TrainerConfig, flags, environ={}).config
    assert config.model.ac is not None
    assert (config.model.ac.keep, config.model.compile is not None) == (["attention"], True)


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


def test_results_of_tests_are_their_counts_and_the_names_of_those_that_failed() -> None:
    output = (
        "..F\nSKIPPED [1] tests/a.py:3: no flash_attn\nFAILED tests/a.py::test_b - x\n1 failed, 2 passed, 1 skipped in 3.1s\n"
    )
    assert parts_script.pytest_counts(output) == {
        "summary": "1 failed, 2 passed, 1 skipped in 3.1s",
        "failed": ["FAILED tests/a.py::test_b - x"],
        "skipped": ["SKIPPED [1] tests/a.py:3: no flash_attn"],
    }
    assert parts_script.pytest_counts("Traceback\n") is None
    assert parts_script.last_json('{"a": 1}\n{broken\nend') == {"a": 1}
    assert parts_script.whole_json("not JSON") is None
