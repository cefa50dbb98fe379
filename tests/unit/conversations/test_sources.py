"""Sources of conversations: files, directories and names of the hub."""

import json
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from trivet.conversations.sources import open_source
from trivet.errors import ConfigError

ROWS = [{"prompt": "ab", "completion": "ba"}, {"prompt": "xy", "completion": "yx"}]


def write(path: Path, rows=ROWS) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return str(path)


def test_every_kind_of_place_holds_the_same_rows(tmp_path: Path) -> None:
    write(tmp_path / "data.jsonl")
    write(tmp_path / "files" / "train.jsonl")
    write(tmp_path / "subsets" / "one" / "train.jsonl")
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "plain")
    DatasetDict({"train": Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "split")
    (tmp_path / "table").mkdir()
    Dataset.from_list(ROWS).to_parquet(tmp_path / "table" / "train.parquet")
    for name, subset in (
        ("data.jsonl", None),
        ("files", None),
        ("subsets", "one"),
        ("plain", None),
        ("split", None),
        ("table", None),
    ):
        assert list(open_source(str(tmp_path / name), subset=subset)) == ROWS


def test_a_split_is_a_file_of_its_name_and_may_be_cut(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [{"n": number} for number in range(40)])
    write(tmp_path / "test.jsonl", [{"n": 99}])
    name = str(tmp_path)
    assert [row["n"] for row in open_source(name, split="test")] == [99]
    assert [row["n"] for row in open_source(name, split="train[:5%]")] == [0, 1]
    assert [row["n"] for row in open_source(name, split="train[5%:]")] == list(range(2, 40))
    assert [row["n"] for row in open_source(name, split="train[-3:]")] == [37, 38, 39]


def test_keys_that_only_other_rows_have_are_not_there(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    rows = [{"messages": [{"role": "user", "content": "x"}, call]}, {"messages": [{"role": "assistant", "content": "y"}]}]
    Dataset.from_list(rows).save_to_disk(tmp_path / "data")
    assert list(open_source(str(tmp_path / "data"))) == rows


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "holds no rows"), ('{"a": 1}\n{broken', "line 2, is not JSON"), ("[1]", "line 1, must be a JSON object")],
)
def test_bad_files_are_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "data.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=message):
        open_source(str(tmp_path / "data.jsonl"))


def test_a_split_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    write(tmp_path / "files" / "train.jsonl")
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "plain")
    DatasetDict({"train": Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "split")
    for name, message in (
        ("files", "has the splits train, and no 'test'"),
        ("split", "has the splits train, and no 'test'"),
        ("plain", "holds one split"),
        ("files/train.jsonl", "is one split"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_source(str(tmp_path / name), split="test")
    with pytest.raises(ConfigError, match="is no slice"):
        open_source(str(tmp_path / "files"), split="train[a:b]")


def test_a_hub_that_cannot_be_reached_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"cannot be reached.*hf download --repo-type dataset nobody/nothing --local-dir"):
        open_source("nobody/nothing")


def test_a_directory_without_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be loaded"):
        open_source(str(tmp_path))
