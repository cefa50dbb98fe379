import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trivet.config.check_files import file_problems
from trivet.config.load import load_config
from trivet.config.model_files import LinearModules, find_linear_modules, find_weight_files
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.trainer import TrainerConfig
from trivet.errors import ConfigError


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
    (problem,) = list(file_problems(load_config(TrainerConfig, argv, environ={}).config))
    assert "model.lora.target_modules: 'v_proj' is no linear module of this model; there are up_proj, wqkv" in problem


def test_the_default_targets_are_refused_for_a_mixture_of_experts_and_the_error_says_what_to_set(tmp_path: Path) -> None:
    layer = "model.layers.0"
    names = [f"{layer}.self_attn.{each}_proj" for each in "qkvo"] + [f"{layer}.mlp.gate"]
    names += [f"{layer}.mlp.experts.{index}.{each}_proj" for index in (0, 1) for each in ("gate", "up", "down")]
    save_file({f"{name}.weight": torch.zeros(4, 4) for name in names}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    argv = ["--model.name", str(tmp_path), "--model.lora.rank", "4"]
    (problem,) = list(file_problems(load_config(TrainerConfig, argv, environ={}).config))
    assert "model.lora.target_modules: 'gate_proj' is no linear module of this model" in problem
    assert "Its experts are one stacked tensor and get no adapter" in problem
    assert problem.endswith('; set model.lora.target_modules = ["q_proj", "k_proj", "v_proj", "o_proj"]')
    argv += ["--model.lora.target-modules", '["q_proj", "k_proj", "v_proj", "o_proj"]']
    assert list(file_problems(load_config(TrainerConfig, argv, environ={}).config)) == []


def test_a_model_for_trying_out_is_not_for_a_run_with_servers() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.model\.debug makes a model that servers do not have"):
        load_config(RLConfig, ["--orchestrator.env.id", "x", "--trainer.model.debug.num-layers", "1"], environ={})


def test_copies_of_the_model_divide_the_gpus() -> None:
    argv = ["--orchestrator.env.id", "x", "--trainer-gpus", "3", "--trainer.model.dp-replicate", "2"]
    with pytest.raises(ConfigError, match=r"dp_replicate \(2\) must divide the GPUs of trainer_gpu_ids \(3\): 3 % 2 = 1"):
        load_config(RLConfig, argv, environ={})


def test_levers_that_contradict_each_other_are_refused() -> None:
    for argv, said in (
        (["--model.ac-offloading.max-inflight-activations", "2"], "add ac"),
        (["--model.fsdp-cpu-offload", "--model.optim-cpu-offload"], "not both"),
        (["--model.ac.mode", "selective", "--model.ac.targets", "[]"], "at least one part"),
        (["--model.ac.targets", '["mlp"]'], 'targets are for mode = "selective"'),
    ):
        with pytest.raises(ConfigError, match=said):
            load_config(TrainerConfig, argv, environ={})


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
    assert list(file_problems(load_config(TrainerConfig, ["--model.name", str(tmp_path)], environ={}).config)) == []


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
    (problem,) = file_problems(load_config(TrainerConfig, ["--model.name", str(tmp_path)], environ={}).config)
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
