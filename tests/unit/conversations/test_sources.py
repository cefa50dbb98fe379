import json
from pathlib import Path

import datasets.config
import pytest
from datasets import Dataset, DatasetDict
from datasets.packaged_modules.parquet.parquet import Parquet

from trivet.conversations.sources import open_source
from trivet.errors import ConfigError

RECORDS = [{"prompt": "ab", "completion": "ba"}, {"prompt": "xy", "completion": "yx"}]


def write(path: Path, records=RECORDS) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n\n")
    return str(path)


# datasets before 5.2 leaves a CSV's file to the garbage collector. That is harmless, but pytest turns the warning into an
# error.
@pytest.mark.filterwarnings("ignore:Exception ignored in.*data.csv:pytest.PytestUnraisableExceptionWarning")
def test_every_kind_of_place_holds_the_same_records(tmp_path: Path) -> None:
    write(tmp_path / "data.jsonl")
    write(tmp_path / "files" / "train.jsonl")
    write(tmp_path / "subsets" / "one" / "train.jsonl")
    Dataset.from_list(RECORDS).save_to_disk(tmp_path / "plain")
    DatasetDict({"train": Dataset.from_list(RECORDS)}).save_to_disk(tmp_path / "split")
    (tmp_path / "table").mkdir()
    Dataset.from_list(RECORDS).to_parquet(tmp_path / "table" / "train.parquet")
    Dataset.from_list(RECORDS).to_csv(tmp_path / "data.csv")
    (arrow,) = (tmp_path / "plain").glob("*.arrow")
    for name, subset in (
        ("data.jsonl", None),
        ("files", None),
        ("subsets", "one"),
        ("plain", None),
        ("split", None),
        ("table", None),
        ("table/train.parquet", None),
        (f"plain/{arrow.name}", None),
        ("data.csv", None),
    ):
        assert list(open_source(str(tmp_path / name), subset=subset)) == RECORDS


def test_a_split_is_a_file_of_its_name_and_may_be_cut(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [{"n": number} for number in range(40)])
    write(tmp_path / "test.jsonl", [{"n": 99}])
    name = str(tmp_path)
    assert [record["n"] for record in open_source(name, split="test")] == [99]
    assert [record["n"] for record in open_source(name, split="train[:5%]")] == [0, 1]
    assert [record["n"] for record in open_source(name, split="train[5%:]")] == list(range(2, 40))
    assert [record["n"] for record in open_source(name, split="train[-3:]")] == [37, 38, 39]


def write_subsets(root: Path) -> dict[str, dict[str, str]]:
    """Write Parquet files by subset and split. Each record names both."""
    files: dict[str, dict[str, str]] = {subset: {} for subset in ("easy", "hard")}
    for subset, by_split in files.items():
        for split in ("train", "test"):
            path = root / subset / f"{split}-of-1.parquet"
            Dataset.from_list([{"from": f"{subset} {split}"}] * 2).to_parquet(path)
            by_split[split] = str(path)
    return files


def keep_as_downloaded(name: str, files: dict[str, dict[str, str]], cache: Path) -> None:
    """Leave what a download of `name` leaves: each subset as Arrow files under the name."""
    for subset, by_split in files.items():
        builder = Parquet(
            dataset_name=name.split("/")[1], config_name=subset, hash="1", data_files=by_split, cache_dir=str(cache / "made")
        )
        builder.download_and_prepare()
        kept = cache / name.replace("/", "___") / subset / "0.0.0"
        kept.mkdir(parents=True)
        Path(builder.cache_dir).rename(kept / "1")


def test_a_name_that_was_downloaded_before_is_read_offline_by_subset_and_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    keep_as_downloaded("nobody/sums", write_subsets(tmp_path / "files"), tmp_path / "cache")
    for subset in ("easy", "hard"):
        for split in ("train", "test"):
            assert list(open_source("nobody/sums", subset=subset, split=split)) == [{"from": f"{subset} {split}"}] * 2
    assert len(open_source("nobody/sums", subset="hard", split="test[1:]")) == 1
    for subset, split, message in (
        ("easy", "validation", r"subset easy, split 'validation', cannot be loaded: Unknown split .* \['train', 'test'\]"),
        ("medium", "train", r"subset medium, split 'train', cannot be loaded: .* \['easy', 'hard'\]"),
        (None, "train", "subset not set, split 'train', cannot be loaded: .* easy, hard .* data.subsets and data.splits"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_source("nobody/sums", subset=subset, split=split)


def test_subsets_of_a_data_set_that_describes_them_are_not_taken_for_its_directories(tmp_path: Path) -> None:
    files = write_subsets(tmp_path)
    swapped = {"easy": files["hard"], "hard": files["easy"]}
    configs = [
        {"config_name": subset, "data_files": [{"split": split, "path": path} for split, path in by_split.items()]}
        for subset, by_split in swapped.items()
    ]
    (tmp_path / "README.md").write_text(f"---\n{json.dumps({'configs': configs})}\n---\n")
    assert open_source(str(tmp_path), subset="easy", split="test")[0] == {"from": "hard test"}
    with pytest.raises(ConfigError, match=r"Available: \['easy', 'hard'\]"):
        open_source(str(tmp_path), subset="medium")


def test_keys_that_only_other_records_have_are_not_there(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    records = [{"messages": [{"role": "user", "content": "x"}, call]}, {"messages": [{"role": "assistant", "content": "y"}]}]
    Dataset.from_list(records).save_to_disk(tmp_path / "data")
    assert list(open_source(str(tmp_path / "data"))) == records


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "holds no records"), ('{"a": 1}\n{broken', "line 2, is not JSON"), ("[1]", "line 1, must be a JSON object")],
)
def test_bad_files_are_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "data.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=message):
        open_source(str(tmp_path / "data.jsonl"))


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_file_may_be_one_list(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "data.json"
    path.write_text("\n" + json.dumps(RECORDS, indent=indent))
    assert list(open_source(str(path))) == RECORDS
    path.write_text("[1, {}]")
    with pytest.raises(ConfigError, match=r"data.json, record 1 of the list, must be a JSON object, got '1'"):
        open_source(str(path))
    path.write_text("[{},")
    with pytest.raises(ConfigError, match=r"data\.json is not JSON"):
        open_source(str(path))


def test_a_file_that_is_no_text_is_named_with_the_endings_of_tables(tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(b"PAR1\xff\xfe")
    with pytest.raises(ConfigError, match=r"data.bin is not text in UTF-8: .*; tables end in .parquet, .arrow, .csv"):
        open_source(str(tmp_path / "data.bin"))


def test_a_split_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    write(tmp_path / "files" / "train.jsonl")
    Dataset.from_list(RECORDS).save_to_disk(tmp_path / "plain")
    DatasetDict({"train": Dataset.from_list(RECORDS)}).save_to_disk(tmp_path / "split")
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
