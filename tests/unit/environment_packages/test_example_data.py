"""Every example environment of the v0 API draws its data from a seed, and evaluates on nothing that it trains on."""

import importlib
from typing import Any

import pytest

COLUMNS = {"wordle": "answer"}
"""The column that tells examples apart; of all others it is the question."""
ARGUMENTS: dict[str, dict[str, Any]] = {
    "alphabet_sort": {"num_examples": 500, "num_eval_examples": 100, "max_turns": 1, "max_names_per_turn": 1},
    "gsm8k": {"dataset": "bundled"},
    "math_python": {"num_examples": 500, "num_eval_examples": 100},
    "reverse_text": {"num_examples": 300, "num_eval_examples": 50, "min_length": 2, "max_length": 3},
    "wiki_search": {"corpus": "invented"},
    "wordle": {"num_examples": 1000, "num_eval_examples": 100},
}


def examples(name: str, **changes: Any) -> tuple[list[str], list[str]]:
    """Return what tells the examples apart that are trained on, and that are evaluated on."""
    env = importlib.import_module(name).load_environment(**ARGUMENTS[name], **changes)
    column = COLUMNS.get(name, "question")
    return list(env.get_dataset()[column]), list(env.get_eval_dataset()[column])


@pytest.mark.parametrize("name", ARGUMENTS)
def test_nothing_is_evaluated_that_is_trained_on(name: str) -> None:
    train, held_out = examples(name)
    assert held_out
    assert not set(train) & set(held_out)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_same_seed_gives_the_same_examples_and_another_seed_others(name: str) -> None:
    first, same, other = (examples(name, seed=seed)[0] for seed in (1, 1, 2))
    assert first == same != other
