"""Compare replaced parts of a model with those of transformers."""

import copy
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, GemmaConfig, GPTNeoXConfig, LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.gemma import modeling_gemma
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from trivet.trainer.kernels.cpu import rms_norm, rotate, speed_up_on_cpu, weight_gradient

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 50,
}


@pytest.fixture(autouse=True)
def keep_modeling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore what a test replaced in transformers' modules."""
    for modeling in (modeling_llama, modeling_gemma, modeling_gpt_neox):
        monkeypatch.setattr(modeling, "apply_rotary_pos_emb", modeling.apply_rotary_pos_emb)


def make_model(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def results(model: PreTrainedModel) -> list[torch.Tensor]:
    tokens = torch.randint(0, 50, (2, 11), generator=torch.Generator().manual_seed(1))
    logits = model(input_ids=tokens, use_cache=False).logits
    gradients = torch.autograd.grad(logits.square().mean(), list(model.parameters()))
    return [logits.detach(), *gradients]


@pytest.mark.parametrize(
    "config",
    [LlamaConfig(**SIZES, attention_bias=True), GemmaConfig(**SIZES), GPTNeoXConfig(**SIZES, rotary_pct=0.5)],
    ids=["llama", "gemma", "gpt_neox"],
)
def test_logits_and_gradients_are_those_of_transformers(config: PreTrainedConfig) -> None:
    model = make_model(config)
    expected = results(model)
    speed_up_on_cpu(model, dtype=torch.float32)
    for found, wanted in zip(results(model), expected, strict=True):
        assert (found - wanted).norm() <= 1e-5 * wanted.norm() + 1e-9


def test_the_norm_is_transformers_own_bit_by_bit_and_its_gradient_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    norm = LlamaRMSNorm(24, eps=1e-5)
    norm.weight.data = torch.randn(24, generator=generator)
    inputs = torch.randn(2, 5, 24, generator=generator).requires_grad_()
    assert torch.equal(rms_norm(inputs, norm.weight, epsilon=1e-5), norm(inputs))
    upstream = torch.randn(2, 5, 24, generator=generator)
    found = torch.autograd.grad(rms_norm(inputs, norm.weight, epsilon=1e-5), (inputs, norm.weight), upstream)
    expected = torch.autograd.grad(norm(inputs), (inputs, norm.weight), upstream)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_norm_that_computes_something_else_is_left_alone() -> None:
    model = make_model(GemmaConfig(**SIZES))
    speed_up_on_cpu(model, dtype=torch.float32)
    assert not any("forward" in vars(module) for module in model.modules() if isinstance(module, GemmaRMSNorm))


def test_rotary_positions_of_another_kind_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def interleaved(q, k, cos, sin, unsqueeze_dim=1):
        return q * cos.unsqueeze(unsqueeze_dim), k * sin.unsqueeze(unsqueeze_dim)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", interleaved)
    speed_up_on_cpu(make_model(LlamaConfig(**SIZES)), dtype=torch.float32)
    assert modeling_llama.apply_rotary_pos_emb is interleaved


@pytest.mark.parametrize(
    ("modeling", "num_rotated"),
    [(modeling_llama, 8), (modeling_gpt_neox, 8), (modeling_gpt_neox, 4)],
    ids=["llama", "whole", "partial"],
)
def test_rotation_has_the_gradient_of_transformers_function(modeling: ModuleType, num_rotated: int) -> None:
    generator = torch.Generator().manual_seed(0)
    angles = torch.rand(1, 6, num_rotated, generator=generator, dtype=torch.float64)
    cos, sin = angles.cos(), angles.sin()
    query, key = (torch.randn(1, heads, 6, 8, generator=generator, dtype=torch.float64).requires_grad_() for heads in (4, 2))
    gradients = []
    for function in (rotate, modeling.apply_rotary_pos_emb):
        outputs = function(query, key, cos, sin)
        gradients.append([*outputs, *torch.autograd.grad(sum(output.square().sin().sum() for output in outputs), (query, key))])
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("features", "outputs"), [(16, 40), (40, 16)])
def test_the_weight_gradient_in_bf16_is_the_product_rounded_once(features: int, outputs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, grad = (torch.randn(64, width, generator=generator).bfloat16() for width in (features, outputs))
    exact = grad.double().T @ inputs.double()
    found = weight_gradient(inputs, grad, dtype=torch.bfloat16)
    assert found.shape == (outputs, features)
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-4)


def test_a_model_may_be_sped_up_twice() -> None:
    model = make_model(LlamaConfig(**SIZES))
    again = copy.deepcopy(model)
    speed_up_on_cpu(model, dtype=torch.float32)
    speed_up_on_cpu(again, dtype=torch.float32)
    assert modeling_llama.apply_rotary_pos_emb is rotate


def test_a_rotation_that_fits_one_model_is_left_alone_in_another_of_other_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = modeling_gpt_neox.apply_rotary_pos_emb

    def rotate_whole_heads_alike(q, k, cos, sin, unsqueeze_dim=1):
        is_partial = cos.shape[-1] < q.shape[-1]
        return whole(q, k, cos, -sin if is_partial else sin, unsqueeze_dim)

    monkeypatch.setattr(modeling_gpt_neox, "apply_rotary_pos_emb", rotate_whole_heads_alike)
    speed_up_on_cpu(make_model(GPTNeoXConfig(**SIZES, rotary_pct=1.0)), dtype=torch.float32)
    assert modeling_gpt_neox.apply_rotary_pos_emb is rotate
    speed_up_on_cpu(make_model(GPTNeoXConfig(**SIZES, rotary_pct=0.5)), dtype=torch.float32)
    assert modeling_gpt_neox.apply_rotary_pos_emb is rotate_whole_heads_alike


class NormOfOtherEpsilonRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight, epsilon=2 * self.variance_epsilon)


def test_a_norm_that_adds_another_epsilon_than_it_says_is_left_alone() -> None:
    model = make_model(LlamaConfig(**SIZES))
    model.model.norm = NormOfOtherEpsilonRMSNorm(32, eps=1e-6)
    speed_up_on_cpu(model, dtype=torch.float32)
    assert "forward" not in vars(model.model.norm)
