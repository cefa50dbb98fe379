import json
import sys
from typing import Any

import pytest

from reverse_text import held_out_texts
from trivet.examples import quickstart_data


def pairs(count: int, **changes) -> list[tuple[str, str]]:
    arguments = {"min_length": 3, "max_length": 4, "share_reversed": 0.5, "seed": 0} | changes
    made: list[Any] = list(quickstart_data.conversations(count, **arguments))
    return [(row["messages"][0]["content"], row["messages"][1]["content"]) for row in made]


def test_every_answer_is_tagged_and_the_share_of_reversals_is_kept():
    made = pairs(2000, min_length=5, max_length=6, share_reversed=0.25)
    answers = [(text, answer.removeprefix("<reversed_text>").removesuffix("</reversed_text>")) for text, answer in made]
    assert all(answer in (text, text[::-1]) for text, answer in answers)
    assert sum(answer != text for text, answer in answers) / 2000 == pytest.approx(0.25, abs=0.03)


def test_no_held_out_text_is_shown():
    held_out = set(held_out_texts(200, min_length=3, max_length=4, seed=0))
    assert not held_out & {text for text, _ in pairs(4000)}


def test_the_same_seed_makes_the_same_file_and_another_seed_another(tmp_path, monkeypatch):
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        monkeypatch.setattr(sys, "argv", ["script", str(tmp_path / name), "--examples", "20", "--seed", seed])
        quickstart_data.main()
    first, second, other = ((tmp_path / name).read_text() for name in "abc")
    assert first == second != other
    assert [message["role"] for message in json.loads(first.splitlines()[0])["messages"]] == ["user", "assistant"]
