import json
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, interleave_datasets
from hypothesis import given
from hypothesis import strategies as st

from trivet.config.schema.sft import ConversationsConfig
from trivet.conversations.mixture import interleave, open_data, step_indices
from trivet.errors import ConfigError


def write(path: Path, words: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"prompt": word, "completion": word[::-1]}) + "\n" for word in words))


@pytest.fixture
def sources(tmp_path: Path) -> str:
    write(tmp_path / "a" / "train.jsonl", ["a0", "a1"])
    write(tmp_path / "b" / "train.jsonl", ["b0", "b1", "b2", "b3"])
    write(tmp_path / "b" / "test.jsonl", ["t0"])
    return str(tmp_path)


def prompts(config: ConversationsConfig, seed: int = 0) -> list[str]:
    data = open_data(config, seed=seed, key="data")
    return [data.conversation(index).messages[0]["content"] for index in range(len(data))]


def test_sources_take_turns_until_the_first_or_all_are_exhausted(sources: str) -> None:
    config = ConversationsConfig(name=sources, subsets=["a", "b"])
    assert prompts(config) == ["a0", "b0", "a1", "b1"]
    config = config.model_copy(update={"stopping_strategy": "all_exhausted"})
    assert prompts(config) == ["a0", "b0", "a1", "b1", "a0", "b2", "a1", "b3"]


def test_a_subset_may_have_a_split_of_its_own_and_one_place_several(sources: str) -> None:
    assert prompts(ConversationsConfig(name=sources, subsets=["a", "b"], splits=["train", "test"])) == ["a0", "t0"]
    assert prompts(ConversationsConfig(name=f"{sources}/b", splits=["train", "test"])) == ["b0", "t0"]


@pytest.mark.parametrize("strategy", ["first_exhausted", "all_exhausted"])
@pytest.mark.parametrize("probabilities", [None, [0.2, 0.5, 0.3]])
def test_a_mixture_is_that_of_datasets(strategy, probabilities: list[float] | None) -> None:
    lengths = [30, 7, 50]
    tables = [
        Dataset.from_dict({"x": [f"{source}/{record}" for record in range(length)]}) for source, length in enumerate(lengths)
    ]
    expected = interleave_datasets(tables, probabilities=probabilities, seed=5, stopping_strategy=strategy)["x"]
    source_N, record_N = interleave(lengths, probabilities=probabilities, seed=5, stopping_strategy=strategy)
    assert [f"{source}/{record}" for source, record in zip(source_N, record_N, strict=True)] == list(expected)


def test_chances_are_those_asked_for_and_follow_the_seed() -> None:
    first, again, other = (
        interleave([4000, 4000], probabilities=[0.8, 0.2], seed=seed, stopping_strategy="first_exhausted")[0]
        for seed in (1, 1, 2)
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first[:100], other[:100])
    # About 5000 draws have five standard deviations of 0.028.
    assert abs(first.mean() - 0.2) < 0.03


def test_a_record_without_a_conversation_is_named_before_the_start(tmp_path: Path) -> None:
    write(tmp_path / "data.jsonl", ["x"] * 150)
    with (tmp_path / "data.jsonl").open("a") as file:
        file.write('{"text": "y"}\n')
    with pytest.raises(ConfigError, match=r"data\.name: record 150 of .*data\.jsonl has the columns text; it needs"):
        open_data(ConversationsConfig(name=str(tmp_path / "data.jsonl")), seed=0, key="data")


@given(st.integers(1, 20), st.integers(1, 30), st.integers(1, 6))
def test_every_epoch_takes_each_record_once(batch_size: int, num_records: int, epochs: int) -> None:
    num_steps = -(-num_records * epochs // batch_size)
    drawn = [
        index
        for step in range(1, num_steps + 1)
        for index in step_indices(step, batch_size=batch_size, num_records=num_records, seed=3, does_shuffle=True)
    ]
    for epoch in range(epochs):
        assert sorted(drawn[epoch * num_records : (epoch + 1) * num_records]) == list(range(num_records))


def test_epochs_have_orders_of_their_own_and_no_shuffle_keeps_the_files() -> None:
    orders = [step_indices(step, batch_size=50, num_records=50, seed=0, does_shuffle=True) for step in (1, 2)]
    assert orders[0] != orders[1]
    assert step_indices(2, batch_size=3, num_records=5, seed=0, does_shuffle=False) == [3, 4, 0]
