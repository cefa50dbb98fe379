"""Random numbers are drawn by the adapter's dropout alone; in supervised fine-tuning also by what config.json says."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trivet.config.load import load_config
from trivet.config.schema.model import ActivationCheckpointConfig, LoRAConfig
from trivet.config.schema.sft import SftConfig
from trivet.config.schema.trainer import TrainerConfig, TrainerModelConfig, TrainingConfig
from trivet.trainer.attention.packed import HeadDims, Segments, register_attention, sdpa_packed
from trivet.trainer.losses.formulas import cross_entropy
from trivet.trainer.model.policy_model import PolicyModel, load_policy, scoring
from trivet.trainer.model.supported import find_random_rates
from trivet.trainer.open_session import make_learner
from trivet.trainer.ranks.world import World
from trivet.trainer.rows import to_tensors

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.15}
OFF = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
RANDOM: dict[str, tuple[str, dict[str, Any]]] = {
    "dropout modules": ("GPT2Config", {**GPT2, **OFF, "resid_pdrop": 0.3}),
    "dropout of embeddings": ("GPT2Config", {**GPT2, **OFF, "embd_pdrop": 0.3}),
    "a dropout module's rate, given to attention": ("GPT2Config", {**GPT2, **OFF, "attn_pdrop": 0.3}),
    "dropout of attention": ("GraniteConfig", {**SIZES, "attention_dropout": 0.3}),
    "dropout of capped attention": ("Gemma2Config", {**SIZES, "attention_dropout": 0.3, "sliding_window": 4096}),
    "a dropout function": ("SeedOssConfig", {**SIZES, "residual_dropout": 0.3, "attention_dropout": 0.0}),
    "noise of a router": ("MixtralConfig", {**SIZES, "num_local_experts": 4, "router_jitter_noise": 0.3}),
    "sampling of a router": ("PhimoeConfig", {**SIZES, "num_local_experts": 4}),
}
LORA = LoRAConfig(rank=4, dropout=0.3, target_modules=["q_proj", "v_proj"])


@pytest.fixture(scope="module")
def random_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directories = {kind: tmp_path_factory.mktemp("model") for kind in RANDOM}
    for kind, (class_name, sizes) in RANDOM.items():
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(getattr(transformers, class_name)(**sizes)).save_pretrained(directories[kind])
    return directories


@pytest.fixture
def score(oracle: Any) -> Any:
    row = to_tensors(oracle.make_row(oracle.make_examples(count=4, vocab_size=64)), device=torch.device("cpu"))
    return lambda model: model(row).logprobs_N


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a parameter."""
    detached = parameter.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def load(directory: Path, world: World, *, keeps_dropout: bool = False, **options: Any) -> PolicyModel:
    torch.manual_seed(0)
    config = TrainerModelConfig(name=str(directory), compute_dtype="float32", **options)
    return load_policy(config, world, keeps_dropout=keeps_dropout)


@pytest.mark.parametrize("kind", RANDOM)
def test_a_policy_of_reinforcement_learning_draws_nothing_and_fine_tuning_what_its_configuration_says(
    random_models: dict[str, Path], world: World, score: Any, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    policy = load(random_models[kind], world)
    assert torch.equal(score(policy), score(policy))
    assert "config.json are not drawn, as servers do not draw them" in caplog.text
    tuned = load(random_models[kind], world, keeps_dropout=True)
    assert not torch.equal(score(tuned), score(tuned))
    assert "config.json are drawn in training steps" in caplog.text
    with scoring(tuned):
        torch.testing.assert_close(score(tuned), score(policy).detach())


def test_of_an_adapted_policy_only_the_adapters_dropout_is_drawn_and_that_is_said(
    random_models: dict[str, Path], world: World, score: Any, caplog: pytest.LogCaptureFixture
) -> None:
    policy = load(random_models["dropout of attention"], world, lora=LORA)
    assert "model.lora.dropout = 0.3 is drawn in training steps, and servers do not draw it" in caplog.text
    for parameter in policy.trained_parameters:
        local_part(parameter).fill_(1.0)
    assert not torch.equal(score(policy), score(policy))
    with scoring(policy):
        assert torch.equal(score(policy), score(policy))
    random = {name for name, module in policy.named_modules() if module.training}
    assert random
    assert all(".lora_dropout" in name for name in random)


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_checkpoint_draws_the_same_numbers_again(
    random_models: dict[str, Path], world: World, score: Any, lora: LoRAConfig | None
) -> None:
    def gradients(**options: Any) -> list[Any]:
        model = load(random_models["dropout of attention"], world, keeps_dropout=True, lora=lora, **options)
        torch.manual_seed(1)
        score(model).sum().backward()
        return [parameter.grad for parameter in model.trained_parameters]

    plain, recomputed = gradients(), gradients(ac=ActivationCheckpointConfig())
    assert any(bool(gradient.any()) for gradient in plain)
    for expected, found in zip(plain, recomputed, strict=True):
        torch.testing.assert_close(found, expected)


def test_rows_of_a_model_that_draws_are_computed_one_after_the_other(random_models: dict[str, Path], world: World) -> None:
    with _threads(2):
        long = {"seq_len": 4096}
        assert load(random_models["a dropout function"], world, **long).lanes.count == 2
        assert load(random_models["a dropout function"], world, keeps_dropout=True, **long).lanes.count == 1


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_packed_attention_zeroes_weights_and_scales_the_others(softcap: float | None) -> None:
    """Values that are unit vectors make the outputs the weights themselves."""
    name = register_attention(
        "sdpa",
        device=torch.device("cpu"),
        dtype=torch.float32,
        has_special_scores=softcap is not None,
        heads=HeadDims(query=16, value=16),
    )
    torch.manual_seed(0)
    query, key = torch.randn(1, 4, 16, 16), torch.randn(1, 2, 16, 16)
    value = torch.eye(16).expand(1, 2, 16, 16)
    segments = Segments.from_paths((8, 4, 4), ((), (0,), (0,)), device=torch.device("cpu"))
    attend = partial(
        ALL_ATTENTION_FUNCTIONS[name], torch.nn.Identity(), query, key, value, None, segments=segments, softcap=softcap
    )
    kept = attend()[0]
    plain = sdpa_packed(torch.nn.Identity(), query, key, value, None, segments=segments, softcap=softcap)[0]
    torch.testing.assert_close(kept, plain)
    dropped = attend(dropout=0.25)[0]
    is_zero = dropped == 0
    torch.testing.assert_close(dropped[~is_zero], kept[~is_zero] / 0.75)
    assert 0.15 < float((is_zero & (kept > 0)).sum() / (kept > 0).sum()) < 0.35


def test_rates_are_those_above_zero_of_the_language_model() -> None:
    config = transformers.GPT2Config(resid_pdrop=0.0, summary_first_dropout=0.1)
    assert find_random_rates(config) == {"embd_pdrop": 0.1, "attn_pdrop": 0.1}


@pytest.mark.parametrize(("kind", "keeps_dropout"), [(TrainerConfig, False), (SftConfig, True)])
def test_only_supervised_fine_tuning_keeps_the_models_dropout(
    tiny_model: Path, world: World, kind: type[TrainingConfig], keeps_dropout: bool
) -> None:
    config = load_config(kind, ["--model.name", str(tiny_model), "--model.compute-dtype", "float32"], environ={}).config
    learner = make_learner(config, world, loss=cross_entropy, max_steps=1)
    assert learner.model.keeps_dropout == keeps_dropout
