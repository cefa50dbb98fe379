"""A tokenizer with tokens that the embedding has no row for is refused before anything starts, with both sizes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import Unigram
from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizerFast

from trivet.config.check_files import file_problems
from trivet.config.load import load_config
from trivet.config.model_files import read_num_rows, read_tokens, require_rows
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.sft import SftConfig
from trivet.config.schema.trainer import TrainerConfig
from trivet.errors import ConfigError

SAID = (
    "has an embedding of 128 tokens, and the tokenizer ({}) has 147: 19 tokens have no row, the first is '<extra_21>' (128); take "
    "the tokenizer that belongs to the model, or enlarge the model once: model.resize_token_embeddings(147), then save_pretrained"
)


@pytest.fixture
def larger(tiny_model: Path, tmp_path: Path) -> Path:
    """The model with 40 tokens added to its 107, and 128 rows as before."""
    directory = tmp_path / "larger"
    shutil.copytree(tiny_model, directory)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_tokens([AddedToken(f"<extra_{number}>", special=number % 2 == 1) for number in range(40)])
    tokenizer.save_pretrained(directory)
    return directory


def problems(kind: Any, *argv: str) -> list[str]:
    return list(file_problems(load_config(kind, list(argv), environ={}).config))


@pytest.mark.parametrize(
    ("kind", "prefix", "more"),
    [
        (RLConfig, "trainer.", ["--orchestrator.env.id", "x", "--orchestrator.rollouts-per-example", "2"]),
        (TrainerConfig, "", []),
        (SftConfig, "", ["--bench.num-steps", "2"]),
    ],
)
def test_a_tokenizer_with_more_tokens_than_rows_is_refused_before_anything_starts(
    larger: Path, tiny_model: Path, kind: Any, prefix: str, more: list[str]
) -> None:
    flag = "--" + prefix
    (problem,) = problems(kind, f"{flag}model.name", str(larger), *more)
    assert problem.endswith(f"model.name ({larger}) {SAID.format(larger)}")
    (problem,) = problems(kind, f"{flag}model.name", str(tiny_model), f"{flag}tokenizer.name", str(larger), *more)
    assert problem.endswith(f"model.name ({tiny_model}) {SAID.format(larger)}")
    assert problems(kind, f"{flag}model.name", str(tiny_model), *more) == []


def test_the_models_own_tokenizer_counts_where_a_server_reads_with_it(larger: Path, tiny_model: Path) -> None:
    names = ["--model.name", str(larger), "--tokenizer.name", str(tiny_model)]
    assert problems(TrainerConfig, *names) == []
    served = [
        "--orchestrator.env.id",
        "x",
        "--orchestrator.rollouts-per-example",
        "2",
        *(name.replace("--", "--trainer.") for name in names),
    ]
    assert len(problems(RLConfig, *served)) == 1


def test_a_stand_in_for_a_picture_needs_no_row(larger: Path) -> None:
    config = larger / "tokenizer_config.json"
    content = json.loads(config.read_text())
    tokens = read_tokens(larger)
    config.write_text(json.dumps(content | {"image_token": "<extra_39>", "audio_token": None}))
    assert read_tokens(larger) == {token: number for token, number in tokens.items() if token != "<extra_39>"}


def test_every_kind_of_tokenizer_file_is_read(tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -2.0)], unk_id=0))
    )
    tokenizer.add_tokens(["c"])
    tokenizer.save_pretrained(tmp_path)
    assert read_tokens(tmp_path) == {"<unk>": 0, "a": 1, "b": 2, "c": 3}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"7": {"content": "d"}}}))
    assert read_tokens(tmp_path)["d"] == 7


def test_files_that_are_not_here_or_say_nothing_refuse_nothing(tmp_path: Path) -> None:
    assert read_tokens(tmp_path) == {}
    assert read_num_rows(tmp_path) is None
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 5}}')
    (tmp_path / "tokenizer.json").write_text("[")
    assert read_num_rows(tmp_path) == 5
    assert read_tokens(tmp_path) == {}


def test_gaps_between_tokens_are_no_missing_rows() -> None:
    require_rows({"a": 0, "b": 9}, 10, model="m", tokenizer="t")
    with pytest.raises(ConfigError, match=r"embedding of 9 tokens, and the tokenizer \(t\) has 10: 1 tokens have no row"):
        require_rows({"a": 0, "b": 9}, 9, model="m", tokenizer="t")
