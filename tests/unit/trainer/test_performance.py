"""Operations of a step, counted by hand."""

from pathlib import Path

import torch

from trivet.trainer.performance import ModelCost, measured_flops, model_cost, peak_memory_gib, total_memory_gib


def test_operations_are_six_per_parameter_and_token_and_causal_attention() -> None:
    cost = ModelCost(matmul_parameters=10, num_layers=2, attention_width=3, hidden_size=5)
    assert cost.flops([4, 2]) == 6 * 10 * 6 + 6 * 2 * 3 * (16 + 4)


def test_the_published_figures_of_prime_rl_come_out_of_its_formula() -> None:
    """One H100, Qwen3-0.6B, 16,384 tokens: 11,896 tokens/s are 11.1 % with all weights, 13,342 are 10.9 % with an adapter."""
    shape = {"num_layers": 28, "attention_width": 16 * 128, "hidden_size": 1024}
    full = ModelCost(matmul_parameters=596_049_920, **shape)
    adapter = 10_092_544
    lora = ModelCost(matmul_parameters=596_049_920 + adapter, frozen_parameters=596_049_920, **shape)
    for cost, tokens_per_s, mfu in ((full, 11_896, 11.1), (lora, 13_342, 10.9)):
        flops = cost.reference_flops(num_tokens=tokens_per_s, seq_len=16_384)
        assert abs(100 * flops / 989e12 - mfu) < 0.06


def test_for_qwen3_06b_the_two_ways_to_count_agree() -> None:
    """Heads twice as wide as the hidden size, and half of the attention: the differences cancel."""
    cost = ModelCost(matmul_parameters=596_049_920, num_layers=28, attention_width=2048, hidden_size=1024)
    assert cost.flops([16_384]) == cost.reference_flops(num_tokens=16_384, seq_len=16_384)


def test_a_rate_of_matrix_products_is_measured() -> None:
    assert 1e8 < measured_flops(torch.device("cpu"), torch.float32) < 1e14


def test_an_embedding_that_is_only_looked_up_does_not_count(tiny_models: dict[str, Path], make_learner) -> None:
    tied, untied = (model_cost(make_learner(tiny_models[name]).model) for name in ("tied", "untied"))
    assert tied == untied


def test_memory_of_the_process_is_measured() -> None:
    assert 0.01 < peak_memory_gib(torch.device("cpu")) < total_memory_gib(torch.device("cpu"))
