"""Compare the operations of a step with counts made by hand."""

from pathlib import Path

import pytest
import torch
import transformers

from trivet.trainer.measurement.performance import ModelCost, measured_flops, model_cost, peak_memory_gib, total_memory_gib

SHAPE = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "tie_word_embeddings": False,
}
MIXTURES = {
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 24},
    "Mixtral": {"num_local_experts": 8, "intermediate_size": 24},
}
"""Mixtures of experts with two layers, by their names for the sizes."""


def test_operations_are_six_per_parameter_and_token_and_causal_attention() -> None:
    cost = ModelCost(matmul_parameters=10, num_layers=2, attention_width=3, hidden_size=5)
    assert cost.flops([4, 2]) == 6 * 10 * 6 + 6 * 2 * 3 * (16 + 4)


def test_the_published_figures_of_prime_rl_come_out_of_its_formula() -> None:
    """The figures are for Qwen3-0.6B on one H100 with 16,384 tokens: 11,896 tokens/s are 11.1 % with all weights, and 13,342 are
    10.9 % with an adapter."""
    shape = {"num_layers": 28, "attention_width": 16 * 128, "hidden_size": 1024}
    full = ModelCost(matmul_parameters=596_049_920, **shape)
    adapter = 10_092_544
    lora = ModelCost(matmul_parameters=596_049_920 + adapter, frozen_parameters=596_049_920, **shape)
    for cost, tokens_per_s, mfu in ((full, 11_896, 11.1), (lora, 13_342, 10.9)):
        flops = cost.reference_flops(num_tokens=tokens_per_s, seq_len=16_384)
        assert abs(100 * flops / 989e12 - mfu) < 0.06


def test_for_qwen3_06b_the_two_ways_to_count_agree() -> None:
    """Its heads are twice as wide as the hidden size, and half of the attention counts: the differences cancel."""
    cost = ModelCost(matmul_parameters=596_049_920, num_layers=28, attention_width=2048, hidden_size=1024)
    assert cost.flops([16_384]) == cost.reference_flops(num_tokens=16_384, seq_len=16_384)


def test_a_rate_of_matrix_products_is_measured() -> None:
    assert 1e8 < measured_flops(torch.device("cpu"), torch.float32) < 1e14


def test_an_embedding_that_is_only_looked_up_does_not_count(tiny_models: dict[str, Path], make_learner) -> None:
    tied, untied = (model_cost(make_learner(tiny_models[name]).model) for name in ("tied", "untied"))
    assert tied == untied


@pytest.mark.parametrize(("family", "names"), MIXTURES.items())
def test_of_a_mixture_only_the_experts_that_a_token_is_sent_to_count(
    tmp_path: Path, make_learner, family: str, names: dict[str, int]
) -> None:
    config = getattr(transformers, f"{family}Config")(**SHAPE, **names, num_experts_per_tok=2, attn_implementation="eager")
    causal_lm = getattr(transformers, f"{family}ForCausalLM")(config)
    causal_lm.save_pretrained(tmp_path)
    of_expert = 3 * 16 * 24
    num_other = sum(p.numel() for name, p in causal_lm.named_parameters() if ".experts." not in name and "embed" not in name)
    # The router, which every token uses, is among the others.
    assert model_cost(make_learner(tmp_path).model).matmul_parameters == num_other + 2 * 2 * of_expert


def test_memory_of_the_process_is_measured() -> None:
    assert 0.01 < peak_memory_gib(torch.device("cpu")) < total_memory_gib(torch.device("cpu"))
