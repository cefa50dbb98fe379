from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trivet.config.checks.files import file_problems
from trivet.config.loading.findings import ConfigFinding
from trivet.config.loading.load import load_config
from trivet.config.model_files import LinearModules, find_linear_modules
from trivet.config.sections.rl import RLConfig
from trivet.config.sections.trainer import TrainerConfig
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
    (problem,) = [ConfigFinding(text).show() for text in file_problems(load_config(TrainerConfig, argv, environ={}).config)]
    assert "model.lora.target_modules: 'v_proj' is no linear module of this model; there are up_proj, wqkv" in problem


def test_the_default_targets_are_refused_for_a_mixture_of_experts_and_the_error_says_what_to_set(tmp_path: Path) -> None:
    layer = "model.layers.0"
    names = [f"{layer}.self_attn.{each}_proj" for each in "qkvo"] + [f"{layer}.mlp.gate"]
    names += [f"{layer}.mlp.experts.{index}.{each}_proj" for index in (0, 1) for each in ("gate", "up", "down")]
    save_file({f"{name}.weight": torch.zeros(4, 4) for name in names}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    argv = ["--model.name", str(tmp_path), "--model.lora.rank", "4"]
    (problem,) = [ConfigFinding(text).show() for text in file_problems(load_config(TrainerConfig, argv, environ={}).config)]
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
