"""Files of a model that lie on this machine are read without loading a weight, and refused where they cannot work."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import Unigram
from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizerFast

from trivet.config.check_files import file_problems
from trivet.config.load import load_config
from trivet.config.model_files import (
    LinearModules,
    find_linear_modules,
    find_weight_files,
    read_num_embeddings,
    read_tokens,
    require_embeddings,
)
from trivet.config.schema.base import Section
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


def problems(kind: type[Section], *argv: str) -> list[str]:
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
    larger: Path, tiny_model: Path, kind: type[Section], prefix: str, more: list[str]
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


def test_files_of_tokens_that_are_not_here_or_say_nothing_refuse_nothing(tmp_path: Path) -> None:
    assert read_tokens(tmp_path) == {}
    assert read_num_embeddings(tmp_path) is None
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 5}}')
    (tmp_path / "tokenizer.json").write_text("[")
    assert read_num_embeddings(tmp_path) == 5
    assert read_tokens(tmp_path) == {}


def test_gaps_between_tokens_are_no_missing_rows() -> None:
    require_embeddings({"a": 0, "b": 9}, 10, model="m", tokenizer="t")
    with pytest.raises(ConfigError, match=r"embedding of 9 tokens, and the tokenizer \(t\) has 10: 1 tokens have no row"):
        require_embeddings({"a": 0, "b": 9}, 9, model="m", tokenizer="t")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tensors = {
        "model.embed_tokens.weight": torch.zeros(8, 4),
        "model.layers.0.self_attn.wqkv.weight": torch.zeros(4, 4),
        "model.layers.0.mlp.up_proj.weight": torch.zeros(8, 4),
        "model.layers.0.norm.weight": torch.zeros(4),
        "lm_head.weight": torch.zeros(8, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_linear_modules_are_matrices_that_are_neither_embedding_nor_head(model: Path) -> None:
    found = find_linear_modules(str(model))
    assert found == LinearModules(names=["model.layers.0.mlp.up_proj", "model.layers.0.self_attn.wqkv"], has_experts=False)


def test_files_that_are_not_here_or_cannot_be_read_tell_nothing(tmp_path: Path) -> None:
    assert find_linear_modules(str(tmp_path)) is None
    assert find_linear_modules("no-such/model") is None
    (tmp_path / "model.safetensors").write_bytes(b"\x10\x00")
    assert find_linear_modules(str(tmp_path)) is None


def test_a_target_that_the_model_does_not_have_is_refused_before_anything_starts(model: Path) -> None:
    argv = ["--model.name", str(model), "--model.lora.rank", "4", "--model.lora.target-modules", '["wqkv", "v_proj"]']
    (problem,) = problems(TrainerConfig, *argv)
    assert "model.lora.target_modules: 'v_proj' is no linear module of this model; there are up_proj, wqkv" in problem


def test_the_default_targets_are_refused_for_a_mixture_of_experts_and_the_error_says_what_to_set(tmp_path: Path) -> None:
    layer = "model.layers.0"
    names = [f"{layer}.self_attn.{each}_proj" for each in "qkvo"] + [f"{layer}.mlp.gate"]
    names += [f"{layer}.mlp.experts.{index}.{each}_proj" for index in (0, 1) for each in ("gate", "up", "down")]
    save_file({f"{name}.weight": torch.zeros(4, 4) for name in names}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    argv = ["--model.name", str(tmp_path), "--model.lora.rank", "4"]
    (problem,) = problems(TrainerConfig, *argv)
    assert "model.lora.target_modules: 'gate_proj' is no linear module of this model" in problem
    assert "Its experts are one stacked tensor and get no adapter" in problem
    assert problem.endswith('; set model.lora.target_modules = ["q_proj", "k_proj", "v_proj", "o_proj"]')
    argv += ["--model.lora.target-modules", '["q_proj", "k_proj", "v_proj", "o_proj"]']
    assert problems(TrainerConfig, *argv) == []


SHARDS = ("model-1-of-2.safetensors", "model-2-of-2.safetensors")


def write_directory(
    directory: Path, files: tuple[str, ...], index: tuple[str, ...] | None, *, of: str = "model.safetensors"
) -> None:
    (directory / "config.json").write_text("{}")
    for name in files:
        (directory / name).touch()
    if index is not None:
        (directory / f"{of}.index.json").write_text(json.dumps({"weight_map": {f"of.{name}": name for name in index}}))


@pytest.mark.parametrize(
    ("files", "index", "expected"),
    [
        ((), None, ()),
        (("model.safetensors",), None, ("model.safetensors",)),
        (SHARDS, SHARDS, SHARDS),
        (("model.safetensors", "pytorch_model.bin", "other.bin"), None, ("model.safetensors",)),
        ((*SHARDS, "model-3-of-3.safetensors"), SHARDS, SHARDS),
        ((*SHARDS, "consolidated.safetensors"), SHARDS, SHARDS),
        (("pytorch_model.bin", "training_args.bin"), None, ("pytorch_model.bin",)),
        (("model.safetensors",), ("model.safetensors",), ("model.safetensors",)),
    ],
)
def test_weight_files_are_those_that_trainer_and_server_read(
    tmp_path: Path, files: tuple[str, ...], index: tuple[str, ...] | None, expected: tuple[str, ...]
) -> None:
    write_directory(tmp_path, files, index)
    assert find_weight_files(tmp_path) == [tmp_path / name for name in expected]
    assert problems(TrainerConfig, "--model.name", str(tmp_path)) == []


@pytest.mark.parametrize(
    ("files", "index", "said"),
    [
        (
            ("model.safetensors", SHARDS[0]),
            None,
            "read model.safetensors, and the server model-1-of-2.safetensors, model.safetensors",
        ),
        (
            ("model.safetensors", *SHARDS),
            SHARDS,
            "read model.safetensors, and the server model-1-of-2.safetensors, model-2-of-2",
        ),
        (("model.safetensors", "consolidated.safetensors"), None, "and the server consolidated.safetensors, model.safetensors"),
        (("consolidated.safetensors",), None, "would read nothing, and the server consolidated.safetensors"),
        (("head.safetensors", "pytorch_model.bin"), None, "would read nothing, and the server head.safetensors"),
        (("pytorch_model.bin", "a.bin", "b.bin"), None, "read pytorch_model.bin, and the server a.bin, b.bin and 1 more"),
        ((SHARDS[0],), SHARDS, "index.json names model-2-of-2.safetensors, which is not there"),
    ],
)
def test_files_of_two_models_are_refused_before_anything_starts(
    tmp_path: Path, files: tuple[str, ...], index: tuple[str, ...] | None, said: str
) -> None:
    write_directory(tmp_path, files, index)
    (problem,) = problems(TrainerConfig, "--model.name", str(tmp_path))
    assert problem.startswith(f"model.name ({tmp_path})")
    assert said in problem


def test_an_index_of_pytorch_files_is_not_read_by_the_server(tmp_path: Path) -> None:
    shards = ("pytorch_model-1.bin", "pytorch_model-2.bin")
    write_directory(tmp_path, shards, shards, of="pytorch_model.bin")
    assert find_weight_files(tmp_path) == [tmp_path / name for name in shards]
    (tmp_path / "pytorch_model-3.bin").touch()
    with pytest.raises(ConfigError, match=r"the server pytorch_model-1\.bin, pytorch_model-2\.bin and 1 more"):
        find_weight_files(tmp_path)


def test_an_index_that_is_none_is_refused(tmp_path: Path) -> None:
    write_directory(tmp_path, SHARDS, None)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json cannot be read as an index of weights"):
        find_weight_files(tmp_path)
