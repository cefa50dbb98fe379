"""What the files of a start model hold is what the trainer builds from them; what it would drop is refused or announced."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from support.tiny_models import make_mixture_config
from trivet.config.schema.model import TrainerModelConfig
from trivet.errors import ConfigError
from trivet.trainer.model.policy_model import PolicyModel, load_policy
from trivet.trainer.ranks.world import World

Tensors = dict[str, torch.Tensor]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
UP = "model.layers.1.mlp.up_proj.weight"


def load(directory: Path, world: World) -> PolicyModel:
    return load_policy(TrainerModelConfig(name=str(directory), compute_dtype="float32"), world)


def copy_model(source: Path, directory: Path, edit: Callable[[Tensors], Tensors], *, is_bin: bool = False) -> Path:
    """Copy a model of one file with other tensors."""
    shutil.copytree(source, directory, dirs_exist_ok=True)
    tensors = edit(load_file(source / "model.safetensors"))
    (directory / "model.safetensors").unlink()
    if is_bin:
        torch.save(tensors, directory / "pytorch_model.bin")
    else:
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


SURPLUS: dict[str, Tensors] = {
    "a layer more than config.json has": {"model.layers.9.mlp.up_proj.weight": torch.zeros(3)},
    "a bias that config.json turns off": {"model.layers.0.self_attn.q_proj.bias": torch.ones(128)},
    "scales of quantized weights": {"model.layers.0.self_attn.q_proj.weight_scale": torch.ones(1)},
    "a norm of another architecture": {"model.layers.0.pre_feedforward_layernorm.weight": torch.ones(128)},
    "a part of more than text": {"visual.patch_embed.weight": torch.ones(2)},
    "a head of another kind": {"score.weight": torch.ones(2, 128)},
}


@pytest.mark.parametrize("is_bin", [False, True])
@pytest.mark.parametrize("kind", SURPLUS)
def test_tensors_without_a_place_in_the_model_are_refused_by_name(
    tiny_model: Path, world: World, tmp_path: Path, kind: str, is_bin: bool
) -> None:
    (name,) = SURPLUS[kind]
    copy_model(tiny_model, tmp_path, lambda tensors: tensors | SURPLUS[kind], is_bin=is_bin)
    with pytest.raises(
        ConfigError, match=rf"hold 1 tensors that Qwen3ForCausalLM has no place for by config\.json, e\.g\. {name}:"
    ):
        load(tmp_path, world)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("is_bin", [False, True])
def test_values_that_are_not_finite_are_refused_by_the_name_of_their_tensor(
    tiny_model: Path, world: World, tmp_path: Path, is_bin: bool, value: float
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"

    def spoil(tensors: Tensors) -> Tensors:
        tensors[name] = tensors[name].clone()
        tensors[name][0, 0] = value
        return tensors

    copy_model(tiny_model, tmp_path, spoil, is_bin=is_bin)
    with pytest.raises(ConfigError, match=rf"{name} in its files holds NaN or infinity"):
        load(tmp_path, world)


def test_under_other_names_surplus_tensors_are_refused_too(tiny_model: Path, world: World, tmp_path: Path) -> None:
    surplus = {"model.layers.9.mlp.up_proj.weight": torch.zeros(3)}
    copy_model(tiny_model, tmp_path, lambda tensors: {n.removeprefix("model."): t for n, t in (tensors | surplus).items()})
    with pytest.raises(ConfigError, match=r"e\.g\. (model\.)?layers\.9\.mlp\.up_proj"):
        load(tmp_path, world)


@pytest.mark.parametrize("is_bin", [False, True])
def test_a_tied_head_with_other_values_than_the_embedding_is_refused(
    tiny_model: Path, world: World, tmp_path: Path, is_bin: bool
) -> None:
    def untie(tensors: Tensors) -> Tensors:
        head = tensors[EMBEDDING].clone()
        head[-1, -1] += 1
        return tensors | {HEAD: head}

    copy_model(tiny_model, tmp_path, untie, is_bin=is_bin)
    with pytest.raises(ConfigError, match=r"config\.json ties lm_head\.weight to the embedding .* tie_word_embeddings = false"):
        load(tmp_path, world)


@pytest.mark.parametrize("is_bin", [False, True])
def test_a_tied_head_that_is_the_embedding_again_is_loaded(
    tiny_model: Path, world: World, tmp_path: Path, is_bin: bool
) -> None:
    copy_model(tiny_model, tmp_path, lambda tensors: tensors | {HEAD: tensors[EMBEDDING].clone()}, is_bin=is_bin)
    model = load(tmp_path, world)
    assert model.head.weight is model.embedding.weight


def test_a_head_that_config_json_does_not_tie_must_be_in_the_files(
    tiny_models: dict[str, Path], world: World, tmp_path: Path
) -> None:
    copy_model(tiny_models["untied"], tmp_path, lambda tensors: {n: t for n, t in tensors.items() if n != HEAD})
    with pytest.raises(ConfigError, match=r"no weights for 1 parameters, e\.g\. lm_head\.weight"):
        load(tmp_path, world)


def test_tensors_that_everyone_computes_are_left_out_and_announced(
    tiny_model: Path, world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    expected = dict(load(tiny_model, world).causal_lm.named_buffers())["model.rotary_emb.inv_freq"]
    wrong = {name: torch.ones(32) for name in ("model.rotary_emb.inv_freq", "model.layers.0.self_attn.rotary_emb.inv_freq")}
    copy_model(tiny_model, tmp_path, lambda tensors: tensors | wrong)
    found = dict(load(tmp_path, world).causal_lm.named_buffers())["model.rotary_emb.inv_freq"]
    assert torch.equal(found, expected)
    assert "neither trained nor published count=2 first=model.layers.0.self_attn.rotary_emb.inv_freq" in caplog.text


def test_layers_that_predict_several_tokens_are_left_out_and_announced(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config = make_mixture_config()
    config.num_nextn_predict_layers = 1
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.layers.2.eh_proj.weight": torch.ones(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    load(tmp_path, world)
    assert "neither trained nor published count=1 first=model.layers.2.eh_proj.weight" in caplog.text
    save_file(tensors | {"model.layers.3.eh_proj.weight": torch.ones(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"e\.g\. model\.layers\.3\.eh_proj\.weight"):
        load(tmp_path, world)


def test_what_the_architecture_itself_leaves_out_is_announced(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    sizes: dict[str, Any] = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    AutoModelForCausalLM.from_config(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        tensors | {"transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64)}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    load(tmp_path, world)
    assert "count=1 first=transformer.h.0.attn.bias" in caplog.text


def test_a_saved_buffer_that_the_files_lack_is_refused(world: World, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(make_mixture_config()).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith("e_score_correction_bias")}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"no weights for 1 parameters, e\.g\. .*e_score_correction_bias"):
        load(tmp_path, world)


def test_a_tensor_in_two_files_is_refused(tiny_model: Path, world: World, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(tmp_path, max_shard_size="200KB")
    first, second = sorted(tmp_path.glob("*.safetensors"))[:2]
    (name, tensor), *_ = load_file(first).items()
    save_file(load_file(second) | {name: tensor + 1}, second, {"format": "pt"})
    with pytest.raises(ConfigError, match=rf"the tensor {name} is in both {first.name} and {second.name}"):
        load(tmp_path, world)


def test_a_tensor_that_the_index_does_not_list_is_read_from_its_file(tiny_model: Path, world: World, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(tmp_path, max_shard_size="200KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"][UP]
    index.write_text(json.dumps(content))
    model = load(tmp_path, world)
    assert torch.equal(model.causal_lm.get_parameter(UP).detach(), load_file(tiny_model / "model.safetensors")[UP])


@pytest.mark.parametrize("cut", [1, 40_000, None])
def test_a_file_that_is_cut_short_is_refused(tiny_model: Path, world: World, tmp_path: Path, cut: int | None) -> None:
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(b"" if cut is None else content[:-cut])
    with pytest.raises(ConfigError, match=r"cannot be loaded as a causal language model: .*cut short"):
        load(tmp_path, world)


@pytest.mark.parametrize("is_bin", [False, True])
def test_weights_wider_than_config_json_says_are_not_rounded(
    tiny_model: Path, world: World, tmp_path: Path, is_bin: bool
) -> None:
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    copy_model(tiny_model, tmp_path, lambda tensors: {n.removeprefix("model."): t for n, t in tensors.items()}, is_bin=is_bin)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    model = load(tmp_path, world)
    assert torch.equal(model.causal_lm.get_parameter(UP).detach(), load_file(tiny_model / "model.safetensors")[UP])


def test_a_pytorch_file_with_a_tensor_of_another_shape_is_refused(tiny_model: Path, world: World, tmp_path: Path) -> None:
    copy_model(tiny_model, tmp_path, lambda tensors: tensors | {UP: torch.ones(8, 128)}, is_bin=True)
    with pytest.raises(ConfigError, match=r"cannot be loaded as a causal language model: .*size"):
        load(tmp_path, world)
