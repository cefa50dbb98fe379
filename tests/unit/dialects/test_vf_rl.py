import io
import json
import os
from pathlib import Path

import msgspec
import pytest

from trivet.checkpoints.run_record import RunRecord
from trivet.config.layout import RunLayout
from trivet.dialects.vf_output import STATE, VfCheckpoints, VfConsole, read_steps
from trivet.dialects.vf_rl import main, show, take_options
from trivet.errors import ConfigError
from trivet.storage.durable import write_json_atomically
from trivet.weights.publish import publish
from trivet.wire.versions import PolicyVersion

TRAINER = {"loss/mean": 0.23456, "optim/lr": 1e-05, "entropy/mean": 2.34, "importance_ratio/mean": 1.02}
ORCHESTRATOR = {"reward/mean": 0.45, "progress/epoch": 0.0123}


def write_step(layout: RunLayout, step: int, *roles: str) -> None:
    layout.metrics.mkdir(parents=True, exist_ok=True)
    for role, values in (("trainer", TRAINER), ("orchestrator", ORCHESTRATOR)):
        if role in roles or not roles:
            with (layout.metrics / f"{role}.jsonl").open("ab") as file:
                file.write(msgspec.json.encode({"step": step, "time": float(step), **values}) + b"\n")


def make_console(layout: RunLayout, *, max_steps: int = 100, line_interval: int = 1, since: float = 0.0) -> VfConsole:
    return VfConsole(
        layout=layout,
        model="models/tiny",
        env="owner/reverse-text",
        max_steps=max_steps,
        line_interval=line_interval,
        since=since,
    )


def begin_run(layout: RunLayout, run_id: str = "r") -> None:
    """Write what the launcher writes when it has locked the directory."""
    write_json_atomically(layout.run_file, RunRecord(id=run_id, attempt=1, started=0.0, pid=1))


def publish_step(layout: RunLayout, step: int, content: bytes = b"weights") -> None:
    def write(directory: Path) -> None:
        (directory / "adapter_model.safetensors").write_bytes(content)
        (directory / "adapter_config.json").write_text("{}")

    publish(layout, version=PolicyVersion(step), run_id="r", write=write)


def test_a_step_is_printed_as_transformers_and_verifiers_do_once_both_roles_have_it(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    console = make_console(layout)
    write_step(layout, 1, "trainer")
    assert list(console.step_lines()) == []
    write_step(layout, 1, "orchestrator")
    assert list(console.step_lines()) == [
        "{'loss': 0.2346, 'learning_rate': 1e-05, 'epoch': 0.0123}",
        "Step 1/100: reward=0.45, entropy=2.34, importance_ratio=1.02",
    ]
    assert list(console.step_lines()) == []


def test_lines_come_every_so_many_steps_and_for_the_last(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    for step in range(1, 6):
        write_step(layout, step)
    lines = list(make_console(layout, max_steps=5, line_interval=2).step_lines())
    assert [line.split(":")[0] for line in lines if line.startswith("Step")] == ["Step 2/5", "Step 4/5", "Step 5/5"]


def test_steps_of_an_earlier_start_are_not_repeated_and_those_taken_again_are_shown(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    for step in (1, 2, 3):
        write_step(layout, step)
    console = make_console(layout, since=10.0)
    assert list(console.step_lines()) == []
    for role in ("trainer", "orchestrator"):
        with (layout.metrics / f"{role}.jsonl").open("ab") as file:
            file.write(msgspec.json.encode({"step": 3, "time": 11.0, "reward/mean": 0.5}) + b"\n")
    assert list(console.step_lines())[1:] == ["Step 3/100: reward=0.5"]


def test_a_damaged_line_is_skipped(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    layout.metrics.mkdir()
    (layout.metrics / "trainer.jsonl").write_bytes(b"\xff{[\n")
    write_step(layout, 1)
    assert list(read_steps(layout)) == [1]


def test_a_half_written_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    write_step(layout, 1)
    with (layout.metrics / "trainer.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "ti')
    assert list(read_steps(layout)) == [1]


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        ("12:00:00 trainer SUCCESS Step 1 | Time: 1.99s | Loss: 0.0123", []),
        ("12:00:00 orchestrator SUCCESS === Step 5 Sample ===", ["=== Step 5 Sample ==="]),
        ("12:00:00 orchestrator SUCCESS Prompt: Reverse the text", ["Prompt: Reverse the text"]),
        ("12:00:00 orchestrator WARNING weights are old", ["12:00:00 orchestrator WARNING weights are old"]),
        (
            "12:00:00 rl inference ready url=http://127.0.0.1:8000 after 60 s",
            ["vLLM server is ready", "Loading environment owner/reverse-text..."],
        ),
        ("12:00:00 rl trainer failed: killed by SIGKILL", ["12:00:00 rl trainer failed: killed by SIGKILL"]),
    ],
)
def test_the_launchers_lines_are_printed_in_the_dialect(tmp_path: Path, line: str, printed: list[str]) -> None:
    assert list(make_console(RunLayout(tmp_path)).translate(line)) == printed


def test_the_start_names_model_and_port(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    layout.configs.mkdir()
    (layout.configs / "inference.toml").write_text("[server]\nport = 8007\n")
    line = "12:00:00 rl started inference pid=1 log=x"
    assert list(make_console(layout).translate(line)) == [
        line,
        "Loading model models/tiny...",
        "Starting vLLM server on port 8007...",
        "Waiting for vLLM server to be ready...",
    ]


def test_checkpoints_are_the_published_files_with_a_state(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    checkpoints = VfCheckpoints(layout, interval=2, max_steps=5)
    begin_run(layout)
    for step in (1, 2, 5):
        publish_step(layout, step)
        write_step(layout, step)
    assert checkpoints.write_due() == [tmp_path / "checkpoint-2", tmp_path / "checkpoint-5"]
    assert checkpoints.write_due() == []
    written = tmp_path / "checkpoint-2"
    assert sorted(path.name for path in written.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        STATE,
    ]
    state = json.loads((written / STATE).read_text())
    assert (state["global_step"], state["max_steps"], state["epoch"]) == (2, 5, 0.0123)
    assert [entry["step"] for entry in state["log_history"]] == [1, 2]
    assert state["log_history"][0]["loss"] == 0.2346


def test_a_policy_that_was_taken_again_replaces_its_checkpoint(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    checkpoints = VfCheckpoints(layout, interval=2, max_steps=2)
    begin_run(layout)
    write_step(layout, 2)
    publish_step(layout, 2)
    checkpoints.write_due()
    publish_step(layout, 2, b"others")
    assert checkpoints.write_due() == [tmp_path / "checkpoint-2"]
    assert (tmp_path / "checkpoint-2" / "adapter_model.safetensors").read_bytes() == b"others"


def test_a_policy_waits_for_the_metrics_of_its_step(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    checkpoints = VfCheckpoints(layout, interval=2, max_steps=2)
    begin_run(layout)
    publish_step(layout, 2)
    assert checkpoints.write_due() == []


def test_a_start_that_is_refused_neither_writes_nor_removes_checkpoints(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    begin_run(layout)
    write_step(layout, 2)
    publish_step(layout, 2)
    (tmp_path / "checkpoint-1").mkdir()
    assert VfCheckpoints(layout, interval=2, max_steps=2, replaces_run=True).write_due() == []
    assert (tmp_path / "checkpoint-1").exists()
    assert not (tmp_path / "checkpoint-2").exists()


def test_checkpoints_of_the_run_before_go_once_the_new_one_has_taken_the_directory(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    begin_run(layout, "before")
    (tmp_path / "checkpoint-1").mkdir()
    checkpoints = VfCheckpoints(layout, interval=2, max_steps=2, replaces_run=True)
    begin_run(layout, "new")
    assert checkpoints.write_due() == []
    assert not (tmp_path / "checkpoint-1").exists()


def test_the_commands_own_options_are_taken_out() -> None:
    rest = ["@", "a.toml", "--trainer.args.max-steps", "3"]
    assert take_options([*rest[:2], "-s", "second", *rest[2:]]) == ("second", rest)
    assert take_options([*rest, "-s", "second", "--no-tmux"]) == (None, rest)
    with pytest.raises(ConfigError, match="needs the name of a session"):
        take_options(["-s", "a.b"])


def test_without_tmux_nothing_starts_and_the_ways_out_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "vf.toml"
    file.write_text('model = "Qwen/Qwen3-0.6B"\n[env]\nid = "reverse-text"\n[inference]\ngpus = 1\n[trainer]\ngpus = 1\n')
    monkeypatch.setattr(os, "environ", os.environ | {"PATH": str(tmp_path)})
    monkeypatch.chdir(tmp_path)
    assert main(["@", str(file)]) == 2
    error = capsys.readouterr().err
    assert "apt-get install tmux" in error
    assert "--no-tmux" in error
    assert [path.name for path in tmp_path.iterdir()] == ["vf.toml"]


def test_what_nobody_reads_any_more_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class ClosedTerminal(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", ClosedTerminal())
    show("Step 1/3: reward=0.5")
