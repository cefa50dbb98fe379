"""The two example tasksets of the v1 API: their tasks are drawn from a seed, and scored as their READMEs say."""

import asyncio
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verifiers.v1")

ENVIRONMENTS = Path(__file__).parents[3] / "environments"


@pytest.fixture(autouse=True)
def _packages_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("count_letters", "shop_clerk"):
        monkeypatch.syspath_prepend(str(ENVIRONMENTS / name))


def replied(text: str, *, calls: tuple[str, ...] = ()) -> Any:
    """A trace whose agent called the tools and then said the text."""
    asked = [SimpleNamespace(name="shop_price", arguments=arguments) for arguments in calls]
    return SimpleNamespace(last_reply=text, assistant_messages=[SimpleNamespace(tool_calls=asked)])


def letters(*, num_tasks: int = 50, **changes: Any) -> Any:
    from count_letters import CountLettersConfig, CountLettersTaskset  # pyright: ignore[reportMissingImports]  on the path here

    return list(CountLettersTaskset(CountLettersConfig(id="count-letters", num_tasks=num_tasks, **changes)).load())


def orders(**changes: Any) -> Any:
    from shop_clerk.taskset import ShopClerkConfig, ShopClerkTaskset  # pyright: ignore[reportMissingImports]  on the path here

    return list(ShopClerkTaskset(ShopClerkConfig(id="shop-clerk", num_tasks=50, **changes)).load())


def test_words_are_drawn_from_the_seed_and_their_letters_are_counted() -> None:
    tasks = letters()
    assert [task.data for task in tasks] == [task.data for task in letters()]
    assert [task.data for task in tasks] != [task.data for task in letters(seed=1)]
    for task in tasks:
        letter, word = task.data.prompt.split('"')[1:4:2]
        assert task.data.answer == word.count(letter)
        assert 5 <= len(word) <= 12


def test_no_number_is_a_better_answer_than_a_guess() -> None:
    tasks = letters(num_tasks=1200)
    means = [fmean(asyncio.run(task.closeness(replied(str(number)))) for task in tasks) for number in range(8)]
    assert max(means) < 0.37  # a guess between 0 and 5 gets 11/36


@pytest.mark.parametrize(
    ("off_by", "reward", "form"), [("{0}", 1.0, 1.0), (" {0}.", 1.0, 1.0), ("{1}", 0.5, 1.0), ("It is {0}", 0.0, 0.0)]
)
def test_a_count_is_scored_by_how_close_it_is(off_by: str, reward: float, form: float) -> None:
    task = letters()[0]
    trace = replied(off_by.format(task.data.answer, task.data.answer + 1))
    assert asyncio.run(task.closeness(trace)) == reward
    assert asyncio.run(task.is_number(trace)) == form


def test_an_order_costs_what_the_goods_cost_with_their_discounts() -> None:
    from shop_clerk.goods import cost  # pyright: ignore[reportMissingImports]  on the path here

    assert (cost("pen", 4), cost("pen", 5), cost("lamp", 2)) == (12, 12, 48)
    for task in orders():
        counts = [int(part.split(" x ")[0].split()[-1]) for part in task.data.prompt.split("?")[0].split(" and ")]
        assert task.data.answer == sum(cost(item, count) for item, count in zip(task.data.items, counts, strict=True))
    assert [task.data for task in orders()] == [task.data for task in orders()]


def test_an_order_is_scored_by_its_sum_and_by_what_was_looked_up() -> None:
    task = orders()[0]
    first, second = (f'{{"item": "{item}"}}' for item in task.data.items)
    whole = replied(f"Let me see.\n{task.data.answer} coins", calls=(first, second))
    half = replied(f"{task.data.answer}\nGood bye", calls=(first, "not json"))
    assert (asyncio.run(task.right_sum(whole)), asyncio.run(task.looked_up(whole))) == (1.0, 1.0)
    assert (asyncio.run(task.right_sum(half)), asyncio.run(task.looked_up(half))) == (0.0, 0.0)
    assert asyncio.run(task.right_sum(replied(""))) == 0.0
