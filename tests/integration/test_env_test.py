"""`trivet env test` on real environments in real worker processes: a sound one, and one with every fault."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from trivet.process.lifetime import module_command

SOUND = """
import verifiers as vf
from datasets import Dataset

def load_environment():
    rows = [{"question": f"What is {n} + {n}? Put it into <sum> tags.", "answer": str(2 * n)} for n in range(20)]
    parser = vf.XMLParser(["sum"], answer_field="sum")

    def is_right(completion, answer):
        return float(parser.parse_answer(completion) == answer)

    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[is_right]))
"""
FAULTY = """
import random
import verifiers as vf
from datasets import Dataset

def load_environment():
    draw = random.SystemRandom()
    rows = [{"question": f"Say {draw.random()}", "answer": "no"} for _ in range(20)]

    def judge(completion, answer):
        text = completion[-1]["content"]
        if not text:
            raise ValueError("an empty answer")
        return float("correct" in text) + 0.5 * (text == answer) + draw.random() / 10

    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[judge]))
"""


def run_test(tmp_path: Path, source: str) -> tuple[int, dict[str, Any]]:
    (tmp_path / "subject.py").write_text(source)
    words = ["env", "test", f"{tmp_path / 'subject.py'}:load_environment", "--examples", "4", "--rollouts", "2", "--json"]
    done = subprocess.run(module_command("trivet.cli.main", *words), capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_sound_environment_is_worth_training_on(tmp_path: Path) -> None:
    code, report = run_test(tmp_path, SOUND)
    assert (code, report["judgement"]["verdict"], report["judgement"]["problems"]) == (0, "yes", [])
    assert report["answer_form"] == "<sum>{}</sum>"
    means = {row["policy"]: row["mean_reward"] for row in report["policies"]}
    assert means["gold"] == 1
    assert means["null"] == means["injecting"] == means["constant"] == 0


@pytest.mark.parametrize(
    "problem",
    [
        "the data differ when a worker starts again",
        "other rewards after a restart",
        "4 of 4 groups of null failed",
        "an answer that only claims to be right gets",
    ],
)
def test_every_fault_of_an_environment_is_named(faulty_report: dict[str, Any], problem: str) -> None:
    assert any(problem in found for found in faulty_report["judgement"]["problems"]), faulty_report["judgement"]


@pytest.fixture(scope="module")
def faulty_report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    code, report = run_test(tmp_path_factory.mktemp("faulty"), FAULTY)
    assert (code, report["judgement"]["verdict"]) == (1, "no")
    return report
