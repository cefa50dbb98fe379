import ast
import asyncio
import operator
from fractions import Fraction

import datasets
import pytest
import verifiers as vf

from gsm8k import load_environment
from gsm8k.environment import LastingMathRubric, bundled_problems, extract_boxed, final_answer
from support.scripted_policy import play

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def value_of(expression: str) -> Fraction:
    def walk(node: ast.expr) -> Fraction:
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](walk(node.left), walk(node.right))
        assert isinstance(node, ast.Constant)
        return Fraction(str(node.value))

    return walk(ast.parse(expression, mode="eval").body)


@pytest.fixture(scope="module")
def env():
    env = load_environment(dataset="bundled")
    yield env
    asyncio.run(env.rubric.teardown())


def test_the_working_of_every_bundled_problem_gives_its_answer():
    problems = bundled_problems()
    assert len({example["question"] for example in problems}) == len(problems) == 60
    assert [example["question"] for example in problems if value_of(example["working"]) != int(example["answer"])] == []


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{42}.", "42"),
        ("\\boxed{1} no, \\boxed{ 1,234 }", "1234"),
        ("\\boxed{\\$18.50}", "18.50"),
        ("\\boxed{\\frac{3}{4}}", "\\frac{3}{4}"),
        ("42", ""),
        ("\\boxed{42", ""),
        ("\\boxed{9^{9^{9}}}", ""),
        ("\\boxed{100!}", ""),
        (f"\\boxed{{{'1' * 41}}}", ""),
    ],
)
def test_the_last_box_is_the_answer_unless_it_could_take_for_ever(text, answer):
    assert extract_boxed(text) == answer


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("\\boxed{27}", 1.0),
        ("<think>\\boxed{5}</think> It is \\boxed{27.0}", 1.0),
        ("\\boxed{\\frac{54}{2}}", 1.0),
        ("\\boxed{28}", 0.0),
        ("27", 0.0),
    ],
)
def test_answers_are_equal_when_their_values_are(env, reply, reward):
    assert play(env, [reply], example={**env.get_dataset()[0], "answer": "27"})["reward"] == reward


def test_a_pool_whose_process_was_killed_is_replaced(caplog):
    rubric = LastingMathRubric(parser=vf.MaybeThinkParser(extract_fn=extract_boxed))

    def rewards(*answers: str) -> list[float]:
        completion = [{"role": "assistant", "content": "\\boxed{27}"}]

        async def compare() -> list[float]:
            return await asyncio.gather(*[rubric.correct_answer(rubric.parser, completion, answer) for answer in answers])

        return asyncio.run(compare())

    assert rewards("27", "28") == [1.0, 0.0]
    for process in rubric.executor._processes.values():
        process.kill()
    assert rewards("27", "28", "27") == [1.0, 0.0, 1.0]
    assert rewards("27") == [1.0]
    assert caplog.text.count("comparing again") == 1
    asyncio.run(rubric.teardown())


def test_the_final_answer_stands_behind_the_mark():
    assert final_answer("3 + 4 = 7\n#### 1,007") == "1007"
    with pytest.raises(ValueError, match="no final answer"):
        final_answer("7")


def test_a_data_set_by_name_is_read_with_its_splits(monkeypatch):
    asked = []

    def load_dataset(name: str, config: str, *, split: str) -> datasets.Dataset:
        asked.append((name, config, split))
        return datasets.Dataset.from_list([{"question": f"{split}?", "answer": "so\n#### 3"}])

    monkeypatch.setattr("gsm8k.environment.load_dataset", load_dataset)
    env = load_environment()
    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    assert env.get_dataset()[0]["answer"] == "3"


def no_network(*_args: object, **_kwargs: object) -> datasets.Dataset:
    raise ConnectionError("no route")


def test_off_line_the_bundled_problems_stand_in_with_a_warning(monkeypatch, caplog):
    monkeypatch.setattr("gsm8k.environment.load_dataset", no_network)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert len(load_environment().get_dataset()) == 48
    assert "using the bundled problems" in caplog.text


def test_a_data_set_that_cannot_be_loaded_is_an_error_with_both_remedies(monkeypatch):
    monkeypatch.setattr("gsm8k.environment.load_dataset", no_network)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(ValueError, match=r'no route.*dataset = "bundled".*HF_HUB_OFFLINE=1'):
        load_environment()
