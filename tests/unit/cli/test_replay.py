"""`trivet replay` on the files of a run and of an evaluation, with real workers of an environment."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trivet.cli import main
from trivet.config.dump import to_toml
from trivet.config.layout import RunLayout
from trivet.config.masking import HIDDEN
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.evaluation.results import TaskRecord
from trivet.wire.groups import SamplingArguments, Split

ENVIRONMENT = """
import verifiers as vf
from datasets import Dataset

def length(completion, **kwargs) -> float:
    return float(len(completion[-1]["content"]))

def load_environment(rows: int = 2, api_key: str = "") -> vf.Environment:
    data = Dataset.from_list([{"question": f"q{index}", "answer": ""} for index in range(rows)])
    return vf.SingleTurnEnv(dataset=data, eval_dataset=data, rubric=vf.Rubric(funcs=[length]))
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "toy.py"
    path.write_text(ENVIRONMENT)
    return f"{path}:load_environment"


def line(example_id: int, index: int, said: str, reward: float, *, question: str | None = None) -> dict[str, Any]:
    return {
        "group_id": example_id,
        "env": "toy",
        "example_id": example_id,
        "index": index,
        "reward": reward,
        "advantage": 0.0,
        "scores": {"length": reward},
        "num_turns": 1,
        "is_truncated": False,
        "completion_tokens": 1,
        "ran_out_of_context": False,
        "prompt": [{"role": "user", "content": question or f"q{example_id}"}],
        "completion": [{"role": "assistant", "content": said}],
    }


def write_lines(path: Path, *lines: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in lines))


@pytest.fixture
def layout(tmp_path: Path, program: str) -> RunLayout:
    """A run of two steps; its second has a rollout of another prompt and one of an example that is gone."""
    layout = RunLayout(tmp_path / "run")
    layout.configs.mkdir(parents=True)
    config = OrchestratorConfig.model_validate(
        {"output_dir": layout.root, "rollouts_per_example": 2, "env": [{"id": program, "name": "toy"}]}
    )
    (layout.configs / "orchestrator.toml").write_text(to_toml(config))
    write_lines(layout.rollouts_step(1) / "rollouts.jsonl", line(0, 0, "four", 4.0), line(0, 1, "three", 1.0))
    write_lines(
        layout.rollouts_step(2) / "rollouts.jsonl",
        line(1, 0, "a", 1.0, question="old"),
        line(5, 0, "b", 1.0),
    )
    return layout


def files_of(layout: RunLayout) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in layout.root.rglob("*") if path.is_file()}


def replay(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main.main(["replay", *words])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_what_changed_is_shown_and_written_and_the_run_stays_as_it_is(
    layout: RunLayout, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, written = files_of(layout), tmp_path / "rescored.jsonl"
    code, said = replay(capsys, str(layout.root), "--json", "--steps", "1", "--write", str(written))
    report = json.loads(said)
    assert (code, report["source"], report["num_scored"], report["num_changed"]) == (0, "rollouts", 2, 1)
    [change] = report["environments"]
    assert change["functions"][0] == {
        "name": "reward",
        "mean_before": 2.5,
        "mean_after": 4.5,
        "num_rollouts": 2,
        "num_changed": 1,
    }
    [most] = report["most_changed"]
    assert (most["index"], most["reward_before"], most["reward_after"], most["completion"]) == (1, 1.0, 5.0, "three")
    assert [json.loads(row)["reward_after"] for row in written.read_text().splitlines()] == [4.0, 5.0]
    assert files_of(layout) == before


def test_rollouts_of_another_prompt_or_a_lost_example_are_counted_apart(
    layout: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = replay(capsys, str(layout.root))
    assert code == 0
    assert "not comparable, example gone: 1 of 4 rollouts" in said
    assert "not comparable, prompt differs: 1 of 4 rollouts" in said
    assert "1 of 2 scored rollouts have another reward; 4 were saved" in said


def evaluated(root: Path, program: str, env_args: dict[str, Any]) -> RunLayout:
    layout = RunLayout(root / "eval")
    directory = layout.evals_step(4, "toy")
    task = TaskRecord(
        env="toy",
        env_id=program,
        env_args=env_args,
        split=Split.EVAL,
        step=4,
        digest="",
        first_example=0,
        num_examples=1,
        rollouts_per_example=1,
        sampling=SamplingArguments(temperature=1.0),
        data_digest="",
    )
    write_lines(directory / "results.jsonl", line(0, 0, "abc", 1.0))
    (directory / "task.json").write_bytes(msgspec.json.encode(task))
    return layout


def test_an_offline_evaluation_is_scored_by_what_its_task_says(
    tmp_path: Path, program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = evaluated(tmp_path, program, {"rows": 1})
    code, said = replay(capsys, str(layout.root), "--json")
    report = json.loads(said)
    assert (code, report["source"], report["environments"][0]["functions"][0]["mean_after"]) == (0, "evals", 3.0)


def test_an_evaluation_whose_arguments_were_secret_is_refused(
    tmp_path: Path, program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = evaluated(tmp_path, program, {"api_key": HIDDEN})
    code, said = replay(capsys, str(layout.root))
    assert code == 2
    assert "hold a secret that task.json does not keep" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--env", "other"], "--env 'other' names none of the environments of the rollouts: toy"),
        (["--steps", "7"], "holds no saved rollouts of these steps"),
        (["--evals"], "holds no saved rollouts"),
        (["--write", "{}/rescored.jsonl"], "which is not changed; choose another place"),
    ],
)
def test_arguments_that_select_nothing_or_change_the_run_are_refused(
    layout: RunLayout, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = replay(capsys, str(layout.root), *(word.format(layout.root) for word in words))
    assert code == 2
    assert said in found


def test_an_environment_that_the_run_does_not_name_is_refused(layout: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
    (layout.configs / "orchestrator.toml").unlink()
    code, said = replay(capsys, str(layout.root))
    assert code == 2
    assert "the settings of environment 'toy' are unknown" in said
