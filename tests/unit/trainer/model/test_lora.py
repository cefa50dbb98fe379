"""Test adapters: what is trained, what is written, and that plain PEFT reads it. Several ranks are in tests/integration."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from support.shards import write_state
from trivet.config.layout import RunLayout
from trivet.config.schema.losses import DefaultLossConfig, GrpoLossConfig
from trivet.config.schema.model import LoRAConfig
from trivet.config.schema.trainer import TrainerConfig, TrainerModelConfig, TrainingConfig
from trivet.errors import ConfigError
from trivet.trainer.checkpoint.state import TrainerProgress, collect_state, load_part
from trivet.trainer.disk_budget import measure_sizes
from trivet.trainer.measurement.performance import model_cost
from trivet.trainer.model.export import Exporter, load_tokenizer
from trivet.trainer.model.lora import add_adapter
from trivet.trainer.model.policy_model import load_policy
from trivet.trainer.model.reference import open_reference
from trivet.trainer.ranks.world import gather_tensor
from trivet.trainer.rows import to_tensors
from trivet.trainer.step import Learner, train_step
from trivet.weights.publish import publish
from trivet.wire.versions import PolicyVersion, Step

LORA = LoRAConfig(rank=4, alpha=8.0, target_modules=["q_proj", r"model\.layers\.1\.mlp\.\w+_proj"])
LOSS = DefaultLossConfig(kl_tau=0.1)
CPU = torch.device("cpu")


def rows_of(oracle, seed: int):
    return [oracle.make_row(oracle.make_examples(count=4, vocab_size=100, seed=seed))]


def export(learner: Learner, base: Path, directory: Path) -> Path:
    config = TrainingConfig(model=TrainerModelConfig(name=str(base)))
    exporter = Exporter(model=learner.model, tokenizer=load_tokenizer(config), dtype=torch.float32)
    directory.mkdir(parents=True, exist_ok=True)
    exporter.write(directory, exporter.gather(keep=True))
    return directory


def trained(make_learner, base: Path, oracle, **values) -> Learner:
    """Take two steps, so that neither factor of an adapter is zero."""
    learner = make_learner(base, **{"lora": LORA, "loss": LOSS, "lr": 1e-2, **values})
    for step in (1, 2):
        train_step(learner, rows_of(oracle, step), step=step)
    return learner


def logprobs_of(learner: Learner, row) -> torch.Tensor:
    with torch.no_grad():
        return learner.model(to_tensors(row, device=CPU)).logprobs_N.clone()


def frozen_of(learner: Learner) -> dict[str, torch.Tensor]:
    named = learner.model.named_parameters()
    return {name: gather_tensor(each).clone() for name, each in named if not each.requires_grad}


def test_an_adapter_changes_nothing_before_the_first_step(any_model: Path, make_learner, oracle) -> None:
    (row,) = rows_of(oracle, 0)
    adapted = make_learner(any_model, lora=LORA, loss=LOSS)
    assert torch.equal(logprobs_of(adapted, row), logprobs_of(make_learner(any_model, loss=LOSS), row))


def test_only_the_adapter_is_trained(any_model: Path, make_learner, oracle) -> None:
    learner = make_learner(any_model, lora=LORA, loss=LOSS, lr=1e-2)
    before = frozen_of(learner)
    train_step(learner, rows_of(oracle, 1), step=1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in frozen_of(learner).items())
    names = [name for name, each in learner.model.named_parameters() if each.requires_grad]
    # There are q_proj of two layers and three projections of one.
    assert len(names) == 2 * (2 + 3)
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    assert len(learner.optimizer.state) == len(names)


def test_frozen_weights_are_kept_in_the_dtype_of_computation(tiny_model: Path, make_learner) -> None:
    learner = make_learner(tiny_model, lora=LORA, compute_dtype="bfloat16")
    dtypes = {each.requires_grad: each.dtype for each in learner.model.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}


def test_loss_and_gradients_are_plain_pefts_however_rows_are_packed(
    any_model: Path, make_learner, oracle, tmp_path: Path
) -> None:
    learner = trained(make_learner, any_model, oracle, lr=1e-3)
    adapter = export(learner, any_model, tmp_path)
    for group in learner.optimizer.param_groups:
        group["weight_decay"] = 0.0
    learner.learning_rate = make_learner(any_model, lr=0.0).learning_rate
    examples = oracle.make_examples(count=9, vocab_size=100)
    expected_loss, expected = oracle.loss_and_gradients(any_model, examples, LOSS, adapter=adapter)
    first: tuple[float, dict[str, torch.Tensor]] | None = None
    for layout, rows in oracle.layouts(examples).items():
        loss = train_step(learner, rows, step=3).loss
        found = {
            name.removeprefix("causal_lm."): gather_tensor(each.grad)
            for name, each in learner.model.named_parameters()
            if each.requires_grad
        }
        first = first or (loss, found)
        assert loss == pytest.approx(first[0], rel=1e-6), layout
        assert oracle.gradient_error(found, first[1]) < 1e-6, layout
        # This is the rounding of float32 against float64: an adapter's factors are two more products in a row.
        assert loss == pytest.approx(expected_loss, rel=5e-6), layout
        assert oracle.gradient_error(found, expected) < 5e-6, layout


@pytest.mark.parametrize("lora", [LORA, LoRAConfig(rank=4, rslora=True, modules_to_save=["norm"])], ids=["names", "rslora"])
def test_what_is_written_scores_the_same_in_plain_peft(
    any_model: Path, make_learner, oracle, tmp_path: Path, lora: LoRAConfig
) -> None:
    learner = trained(make_learner, any_model, oracle, lora=lora)
    directory = export(learner, any_model, tmp_path)
    example = oracle.make_examples(count=1, vocab_size=100, seed=7)[0]
    row = oracle.make_row([example])
    tensors = to_tensors(row, device=CPU)
    plain = oracle.load_model(any_model, adapter=directory).float()
    with torch.no_grad():
        logits = plain(input_ids=tensors.token_ids_1U).logits[0] / example.temperature
    theirs = torch.log_softmax(logits, dim=-1)[tensors.predictors_N, tensors.targets_N]
    torch.testing.assert_close(logprobs_of(learner, row), theirs)
    base = AutoModelForCausalLM.from_pretrained(any_model, dtype=torch.float32)
    with torch.no_grad():
        assert not torch.allclose(base(input_ids=tensors.token_ids_1U).logits[0] / example.temperature, logits, atol=1e-3)


def test_what_is_written_is_the_adapter_alone_and_names_its_base(
    tiny_model: Path, make_learner, oracle, tmp_path: Path
) -> None:
    learner = trained(make_learner, tiny_model, oracle)
    first, second = (export(learner, tiny_model, tmp_path / name) for name in ("first", "second"))
    described = json.loads((first / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(tiny_model)
    assert (described["r"], described["lora_alpha"], described["inference_mode"]) == (4, 8.0, True)
    assert not list(first.glob("model*"))
    assert (first / "tokenizer.json").exists()
    with safe_open(first / "adapter_model.safetensors", "pt") as file:
        assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in file.keys()  # noqa: SIM118  not a mapping
        assert len(list(file.keys())) == len(learner.model.trained_parameters)
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes(), path.name


def test_a_run_that_is_saved_and_loaded_continues_exactly(any_model: Path, make_learner, oracle, tmp_path: Path) -> None:
    unbroken = trained(make_learner, any_model, oracle)
    write_state(tmp_path, collect_state(unbroken, TrainerProgress(step=2)), unbroken.world)
    expected = train_step(unbroken, rows_of(oracle, 3), step=3).loss
    torch.manual_seed(123)
    resumed = make_learner(any_model, lora=LORA, loss=LOSS, lr=1e-2)
    assert load_part(tmp_path, resumed) == TrainerProgress(step=2)
    assert train_step(resumed, rows_of(oracle, 3), step=3).loss == expected
    for ours, theirs in zip(resumed.model.parameters(), unbroken.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_checkpoint_holds_what_is_trained_and_nothing_else(any_model: Path, make_learner, oracle) -> None:
    learner = trained(make_learner, any_model, oracle)
    saved = collect_state(learner, TrainerProgress())
    assert saved["model"].keys() == {name for name, each in learner.model.named_parameters() if each.requires_grad}
    sizes = measure_sizes(learner.model, TrainerConfig(model=TrainerModelConfig(compute_dtype="bfloat16")))
    assert sizes.weights == 2 * sum(tensor.numel() for tensor in saved["model"].values())
    assert sizes.checkpoint == 6 * sizes.weights


def test_a_published_adapter_is_the_reference_that_a_resume_finds(
    tiny_model: Path, make_learner, oracle, tmp_path: Path
) -> None:
    learner = trained(make_learner, tiny_model, oracle)
    (row,) = rows_of(oracle, 9)
    expected = logprobs_of(learner, row)
    layout = RunLayout(tmp_path)
    publish(
        layout, version=PolicyVersion(2), run_id="test", write=lambda staging: export(learner, tiny_model, staging) and None
    )
    train_step(learner, rows_of(oracle, 3), step=3)
    config = TrainerModelConfig(name=str(tiny_model), compute_dtype="float32", fused_lm_head_chunk_size=7, lora=LORA)
    loss = GrpoLossConfig(beta=0.5, reference_update_interval=2)
    reference = open_reference(loss, learner.model, config=config, layout=layout, from_step=Step(3), world=learner.world)
    assert reference is not None
    (scored,) = reference.score(learner.model, [to_tensors(row, device=CPU)])
    assert torch.equal(scored.reference_logprobs_N, expected)
    assert not torch.equal(logprobs_of(learner, row), expected)


def test_a_module_that_the_model_does_not_have_is_refused_with_those_it_has(tiny_model: Path, world) -> None:
    config = TrainerModelConfig(
        name=str(tiny_model), compute_dtype="float32", lora=LoRAConfig(target_modules=["q_proj", "wqkv"])
    )
    with pytest.raises(
        ConfigError, match=r"target_modules: 'wqkv' is no .*down_proj, gate_proj, k_proj, o_proj, q_proj, up_pr"
    ):
        load_policy(config, world)
    config = TrainerModelConfig(name=str(tiny_model), compute_dtype="float32", lora=LoRAConfig(modules_to_save=["lm_head"]))
    with pytest.raises(ConfigError, match=r"modules_to_save: 'lm_head' is no module .*there are .*input_layernorm.* norm"):
        load_policy(config, world)


def test_an_adapter_of_a_mixture_leaves_the_experts_out_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"hidden_size": 16, "moe_intermediate_size": 8, "num_experts": 2, "num_hidden_layers": 1, "vocab_size": 32}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes, num_attention_heads=2, head_dim=8))
    with pytest.raises(
        ConfigError, match=r'Its experts are .* set model\.lora\.target_modules = \["q_proj", "k_proj", .*"o_proj"\]'
    ):
        add_adapter(model, LoRAConfig(), base_name="moe", dtype=torch.float32)
    with caplog.at_level("INFO"):
        add_adapter(model, LoRAConfig(target_modules=["q_proj"]), base_name="moe", dtype=torch.float32)
    assert "experts get no adapter" in caplog.text
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained
    assert all(".q_proj.lora_" in name for name in trained)


def test_a_model_name_that_is_an_adapter_is_told_to_be_merged(tiny_model: Path, make_learner, world, tmp_path: Path) -> None:
    adapter = export(make_learner(tiny_model, lora=LORA), tiny_model, tmp_path)
    with pytest.raises(ConfigError, match=r"is an adapter; .*trivet merge"):
        load_policy(TrainerModelConfig(name=str(adapter)), world)


def test_frozen_parameters_cost_two_operations_less(tiny_model: Path, make_learner) -> None:
    adapted, full = (model_cost(make_learner(tiny_model, lora=lora).model) for lora in (LORA, None))
    num_trained = adapted.matmul_parameters - full.matmul_parameters
    assert adapted.frozen_parameters == full.matmul_parameters
    assert full.frozen_parameters == 0
    assert adapted.flops([1]) - full.flops([1]) == 6 * num_trained - 2 * full.matmul_parameters
