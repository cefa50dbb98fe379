"""What needs reasoning-gym is slow: it lives in a virtual environment of its own, where a test of verifiers' releases runs this."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verifiers.legacy")

from support.scripted_policy import play

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


@pytest.fixture(autouse=True)
def _package_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "environments" / "reasoning_tasks"))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> 3 </answer> and so on", "3"),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("First 4 - 1.\n4 - 1 = 3.", "3"),
        ("The answer is: noremopyh", "noremopyh"),
        ("7", "7"),
        ("", ""),
        ("\n \n", ""),
    ],
)
def test_the_answer_is_tagged_or_ends_the_last_line(text: str, answer: str) -> None:
    from reasoning_tasks import final_answer  # pyright: ignore[reportMissingImports]  on the path here

    assert final_answer(text) == answer


class HalfRight:
    """Tasks that score every answer but "right" with 0.8."""

    def __getitem__(self, place: int) -> dict[str, int]:
        return {"place": place}

    def score_answer(self, answer: str, *, entry: dict[str, int]) -> float:
        return 1.0 if answer == "right" and entry == {"place": 3} else 0.8


@pytest.mark.parametrize(
    ("text", "partial_credit", "score"),
    [("right", True, 1.0), ("right", False, 1.0), ("rightttt", True, 0.8), ("rightttt", False, 0.0)],
)
def test_without_partial_credit_right_answers_alone_are_rewarded(text: str, partial_credit: bool, score: float) -> None:
    from reasoning_tasks import score_text  # pyright: ignore[reportMissingImports]  on the path here

    assert score_text(text, tasks=HalfRight(), place=3, partial_credit=partial_credit) == score


def load(**changes: Any) -> Any:
    pytest.importorskip("reasoning_gym")
    from reasoning_tasks import load_environment  # pyright: ignore[reportMissingImports]  on the path here

    return load_environment(**({"num_examples": 40, "num_eval_examples": 10, "settings": SUMS} | changes))


@pytest.mark.slow
def test_a_right_answer_has_the_reward_1_and_a_wrong_one_little() -> None:
    env = load()
    example = env.get_dataset()[3]
    assert play(env, [f"{example['question'].split(': ')[1]} {example['answer']}"], example=example)["reward"] == 1.0
    assert play(env, ["I do not know"], example=example)["reward"] < 0.1


@pytest.mark.slow
def test_a_seed_draws_the_tasks_and_none_is_trained_and_held_out() -> None:
    first, same, other = (load(seed=seed, settings={"min_digits": 4}) for seed in (1, 1, 2))
    questions = [list(env.get_dataset()["question"]) for env in (first, same, other)]
    assert questions[0] == questions[1]
    assert not set(questions[0]) & set(questions[2])
    held_out = set(first.get_eval_dataset()["question"])
    assert len(held_out) == 10
    assert not held_out & set(questions[0])


@pytest.mark.slow
def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(ValueError, match="no_such_task"):
        load(task="no_such_task")


@pytest.mark.slow
def test_the_program_writes_right_answers_to_tasks_that_are_not_trained_on(tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("reasoning_gym")
    from reasoning_tasks import main  # pyright: ignore[reportMissingImports]  on the path here

    file, settings = tmp_path / "new" / "sft.jsonl", SUMS | {"min_digits": 4, "max_digits": 4}
    monkeypatch.setattr(
        sys, "argv", ["main", str(file), "--task", "chain_sum", "--settings", json.dumps(settings), "--examples", "30"]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    shown = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    assert len(shown) == 30
    assert not {question["content"] for question, _ in shown} & set(load(settings=settings).get_dataset()["question"])
    for question, answer in shown:
        said = question["content"].split(":")[1].removesuffix("=").strip()
        first, sign, second = said.split()
        assert int(answer["content"]) == int(first) + (int(second) if sign == "+" else -int(second))
