"""The start model comes from its files, from rank 0's memory or from random numbers, and equals what transformers loads."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from support.tiny_models import make_mixture_config
from trivet.config.schema.model import DebugModelConfig, LoRAConfig, TrainerModelConfig
from trivet.errors import ConfigError
from trivet.trainer.model.export import gather_weights
from trivet.trainer.model.initial_weights import original_name
from trivet.trainer.model.policy_model import PolicyModel, load_policy
from trivet.trainer.ranks.world import World, open_world


def load(directory: Path, world: World, **options: Any) -> PolicyModel:
    return load_policy(TrainerModelConfig(name=str(directory), compute_dtype="float32", **options), world)


def weights_of(model: PolicyModel) -> dict[str, torch.Tensor]:
    return gather_weights(model, dtype=torch.float32, keep=True)


def require_same(found: dict[str, torch.Tensor], directory: Path) -> None:
    expected = dict(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).named_parameters())
    assert expected.keys() <= found.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


def test_weights_and_buffers_are_those_that_transformers_loads(any_model: Path, world: World) -> None:
    model = load(any_model, world)
    require_same(weights_of(model), any_model)
    expected = dict(AutoModelForCausalLM.from_pretrained(any_model).named_buffers())
    found = dict(model.causal_lm.named_buffers())
    assert found.keys() == expected.keys()
    for name, buffer in expected.items():
        assert torch.equal(found[name], buffer), name
    is_tied = model.causal_lm.config.tie_word_embeddings
    assert (model.head.weight is model.embedding.weight) == is_tied


def test_a_model_in_several_files_is_the_same(any_model: Path, world: World, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(any_model).save_pretrained(tmp_path, max_shard_size="200KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    require_same(weights_of(load(tmp_path, world)), any_model)


def test_files_with_other_names_are_loaded_by_transformers(
    tiny_model: Path, world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    weights = load_file(tiny_model / "model.safetensors")
    save_file(
        {name.removeprefix("model."): weight for name, weight in weights.items()},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    model = load(tmp_path, world)
    assert "are not those of its parameters" in caplog.text
    require_same(weights_of(model), tiny_model)


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=2, target_modules=["q_proj"], modules_to_save=["gate"])])
def test_the_balance_of_experts_is_loaded_although_it_is_no_parameter(
    lora: LoRAConfig | None, world: World, tmp_path: Path
) -> None:
    """Files have one matrix for each expert, and the model one tensor for all: rank 0 loads it."""
    config = make_mixture_config()
    causal_lm = AutoModelForCausalLM.from_config(config)
    balances = {name: buffer for name, buffer in causal_lm.named_buffers() if name.endswith("e_score_correction_bias")}
    assert balances
    for buffer in balances.values():
        buffer.copy_(torch.tensor([0.5, -1.0, 2.0, 0.25]))
    causal_lm.save_pretrained(tmp_path)
    found = [
        (original_name(name), buffer)
        for name, buffer in load(tmp_path, world, lora=lora).causal_lm.named_buffers()
        if name.endswith("e_score_correction_bias")
    ]
    assert len(found) == len(balances) * (1 if lora is None else 2)  # PEFT keeps the module that it trains a copy of
    for name, buffer in found:
        assert torch.equal(balances[str(name)], buffer), name


def test_a_model_whose_files_lack_a_weight_is_refused(tiny_models: dict[str, Path], world: World, tmp_path: Path) -> None:
    shutil.copytree(tiny_models["untied"], tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"no weights for 1 parameters, e\.g\. model\.layers\.1\.mlp\.up_proj"):
        load(tmp_path, world)


def test_a_tensor_of_another_shape_is_refused(tiny_model: Path, world: World, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 8}))
    with pytest.raises(ConfigError, match=r"has the shape \[384, 128\] in the files and \[8, 128\] by config\.json"):
        load(tmp_path, world)


def test_quantized_weights_are_refused(tiny_model: Path, world: World, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigError, match="has quantized weights"):
        load(tmp_path, world)


def test_a_model_of_fewer_layers_has_the_first_ones_and_is_published_as_one(tiny_model: Path, world: World) -> None:
    model = load(tiny_model, world, debug=DebugModelConfig(num_layers=1))
    expected = load_file(tiny_model / "model.safetensors")
    found = weights_of(model)
    assert {name.split(".")[2] for name in found if ".layers." in name} == {"0"}
    assert all(torch.equal(weight, expected[name]) for name, weight in found.items())
    assert (model.causal_lm.config.num_hidden_layers, len(model.causal_lm.config.layer_types)) == (1, 1)
    with pytest.raises(ConfigError, match=r"num_layers \(3\) must be <= 2"):
        load(tiny_model, world, debug=DebugModelConfig(num_layers=3))


def test_random_weights_come_from_the_seed_and_disturb_no_other_random_number(tiny_model: Path, world: World) -> None:
    def draw(seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        torch.manual_seed(seed)
        return weights_of(load(tiny_model, world, debug=DebugModelConfig(random_init=True))), torch.rand(3)

    (first, after), (again, _), (other, _) = draw(1), draw(1), draw(2)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(3))
    for name, weight in first.items():
        assert torch.equal(weight, again[name]), name
        if weight.ndim == 1:
            assert torch.equal(weight, torch.ones_like(weight)), name
        else:
            assert not torch.equal(weight, other[name]), name
            assert float(weight.std()) == pytest.approx(0.02, rel=0.1), name
    layers = ["model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"]
    assert not torch.equal(first[layers[0]], first[layers[1]])


def test_an_adapter_starts_as_pefts_and_its_names_lead_to_the_files(tiny_model: Path, world: World) -> None:
    model = load(tiny_model, world, lora=LoRAConfig(rank=4, target_modules=["q_proj"], modules_to_save=["norm"]))
    found = weights_of(model)
    first = [weight for name, weight in found.items() if ".lora_A." in name]
    bound = 128**-0.5  # Kaiming-uniform with a = sqrt(5): 1 / sqrt(fan in)
    assert all(0.8 * bound < float(weight.abs().max()) <= bound for weight in first)
    assert not torch.equal(first[0], first[1])
    assert all(not weight.any() for name, weight in found.items() if ".lora_B." in name)
    saved = load_file(tiny_model / "model.safetensors")
    for name, weight in found.items():
        original = original_name(name)
        assert original is None or torch.equal(weight, saved[original]), name


def test_copies_of_the_model_divide_the_ranks() -> None:
    said = r"dp_replicate \(2\) must divide the trainer's ranks \(1\): 1 % 2 = 1; set it to one of 1"
    with pytest.raises(ConfigError, match=said), open_world(device="cpu", timeout_s=30, num_replicas=2):
        pass


def weights_in_bfloat16(model: Path, directory: Path) -> Path:
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("dtype", "dither", "is_moved"), [("bfloat16", True, True), ("bfloat16", False, False), ("float32", True, False)]
)
def test_start_weights_are_dithered_where_they_are_rounded_to_bfloat16(
    any_model: Path, world: World, tmp_path: Path, dtype: str, dither: bool, is_moved: bool
) -> None:
    directory = weights_in_bfloat16(any_model, tmp_path)
    config = TrainerModelConfig.model_validate({"name": str(directory), "compute_dtype": dtype, "dither": dither})
    model = load_policy(config, world)
    masters, published = weights_of(model), gather_weights(model, dtype=torch.bfloat16, keep=True)
    expected = dict(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).named_parameters())
    for name, weight in expected.items():
        assert torch.equal(published[name], weight), name
        assert torch.equal(masters[name], weight.float()) != (is_moved and bool((weight != 0).any())), name


def test_the_frozen_weights_below_an_adapter_are_not_dithered(tiny_model: Path, world: World, tmp_path: Path) -> None:
    directory = weights_in_bfloat16(tiny_model, tmp_path)
    model = load_policy(
        TrainerModelConfig(name=str(directory), compute_dtype="bfloat16", lora=LoRAConfig(rank=2, target_modules=["q_proj"])),
        world,
    )
    masters = dict(model.causal_lm.named_parameters())
    frozen = {name.replace("base_model.model.", ""): p for name, p in masters.items() if not p.requires_grad}
    name = "model.embed_tokens.weight"
    weight = load_file(directory / "model.safetensors")[name]
    kept = frozen[name].detach()
    assert torch.equal((kept.full_tensor() if isinstance(kept, DTensor) else kept).float(), weight.float())
