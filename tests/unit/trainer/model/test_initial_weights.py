"""The start model equals what transformers loads from its files; what the trainer would drop is refused or announced."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, RecurrentGemmaConfig

from support.families import FAMILIES, Family
from support.tiny_models import make_mixture_config
from trivet.config.schema.model import DebugModelConfig, LoRAConfig, TrainerModelConfig
from trivet.errors import ConfigError
from trivet.trainer.model.export import gather_weights
from trivet.trainer.model.initial_weights import original_name
from trivet.trainer.model.policy_model import PolicyModel, load_policy
from trivet.trainer.model.weight_files import SafetensorsWeights, StackedWeights
from trivet.trainer.ranks.world import World

Tensors = dict[str, torch.Tensor]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
UP = "model.layers.1.mlp.up_proj.weight"
MIXTURES = ("Qwen3-MoE", "DeepSeek-V3", "GLM-4-MoE", "OLMoE", "Mixtral")


def load(directory: Path, world: World, **options: Any) -> PolicyModel:
    return load_policy(TrainerModelConfig(name=str(directory), compute_dtype="float32", **options), world)


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
    "scales of quantized weights": {"model.layers.0.self_attn.q_proj.weight_scale": torch.ones(1)},
    "a part of more than text": {"visual.patch_embed.weight": torch.ones(2)},
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


@pytest.mark.parametrize("missing", [HEAD, UP, "model.layers.0.mlp.gate.e_score_correction_bias"])
def test_a_weight_or_a_saved_buffer_that_the_files_lack_is_refused(
    tiny_models: dict[str, Path], world: World, tmp_path: Path, missing: str
) -> None:
    source = tiny_models["untied"]
    if "gate" in missing:
        AutoModelForCausalLM.from_config(make_mixture_config()).save_pretrained(source := tmp_path / "mixture")
        names = load_file(source / "model.safetensors")
        missing = next(name for name in names if name.endswith("e_score_correction_bias"))
    copy_model(source, tmp_path / "copy", lambda tensors: {n: t for n, t in tensors.items() if n != missing})
    with pytest.raises(ConfigError, match=rf"no weights for 1 parameters, e\.g\. {missing}"):
        load(tmp_path / "copy", world)


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
    tiny_model: Path, world: World, tmp_path: Path, is_bin: bool, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    copy_model(tiny_model, tmp_path, lambda tensors: {n.removeprefix("model."): t for n, t in tensors.items()}, is_bin=is_bin)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    model = load(tmp_path, world)
    assert "are not those of its parameters" in caplog.text, "transformers loads files of other names"
    assert torch.equal(model.causal_lm.get_parameter(UP).detach(), load_file(tiny_model / "model.safetensors")[UP])


def test_a_pytorch_file_with_a_tensor_of_another_shape_is_refused(tiny_model: Path, world: World, tmp_path: Path) -> None:
    copy_model(tiny_model, tmp_path, lambda tensors: tensors | {UP: torch.ones(8, 128)}, is_bin=True)
    with pytest.raises(ConfigError, match=r"cannot be loaded as a causal language model: .*size"):
        load(tmp_path, world)


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


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=2, target_modules=["q_proj"], modules_to_save=["gate"])])
def test_the_balance_of_experts_is_loaded_although_it_is_no_parameter(
    lora: LoRAConfig | None, world: World, tmp_path: Path
) -> None:
    """Files have one matrix for each expert, and the model one tensor for all."""
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


def test_rows_are_divided_only_where_heads_and_attention_allow_it(tiny_model: Path, tmp_path: Path, world: World) -> None:
    with pytest.raises(ConfigError, match=r"model.cp \(3\) must divide the attention heads of model.name \(2\): 2 % 3 = 2"):
        load(tiny_model, world, cp=3)
    stateful = RecurrentGemmaConfig(vocab_size=64, hidden_size=32, num_attention_heads=4, num_hidden_layers=3, lru_width=32)
    AutoModelForCausalLM.from_config(stateful).save_pretrained(tmp_path / "stateful")
    with pytest.raises(ConfigError, match=r"cannot divide the rows of model.name .* its layers carry a state along the row"):
        load(tmp_path / "stateful", world, cp=2)


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


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.name in MIXTURES], ids=lambda family: family.key)
def test_each_rank_reads_the_experts_of_its_shard_alone(
    family: Family, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The files of these families have one matrix for each expert and part of it, the model two tensors for all."""
    family.save(tmp_path)
    whole = load(tmp_path, world)
    assert "rank 0 loads" not in caplog.text
    expected = dict(AutoModelForCausalLM.from_pretrained(tmp_path).state_dict())
    found = {original_name(name): tensor for name, tensor in whole.causal_lm.state_dict().items()}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    files = SafetensorsWeights.find(str(tmp_path))
    assert files is not None
    source = StackedWeights.convert(files, whole.causal_lm)
    assert source is not None
    read: list[str] = []
    read_all = StackedWeights._read_all
    monkeypatch.setattr(StackedWeights, "_read_all", lambda self, tensor: read.append(tensor) or read_all(self, tensor))
    stacks = [name for name in expected if ".experts." in name and expected[name].ndim == 3]
    assert stacks
    for name in stacks:
        shape = expected[name].shape
        assert torch.equal(source.read(name, shape=shape, first_row=1, num_rows=2), expected[name][1:3])
        assert source.read(name, shape=shape, first_row=4, num_rows=0).shape == (0, *shape[1:])
        with pytest.raises(ConfigError, match="by config"):
            source.read(name, shape=torch.Size([5, *shape[1:]]), first_row=0, num_rows=1)
    assert {tensor.split(".experts.")[1].split(".")[0] for tensor in read} == {"1", "2"}
