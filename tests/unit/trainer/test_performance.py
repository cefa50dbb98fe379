"""Operations of a step, counted by hand."""

from pathlib import Path

import torch

from trivet.trainer.performance import ModelCost, model_cost, peak_memory_gib


def test_operations_are_six_per_parameter_and_token_and_causal_attention() -> None:
    cost = ModelCost(matmul_parameters=10, num_layers=2, attention_width=3)
    assert cost.flops([4, 2]) == 6 * 10 * 6 + 6 * 2 * 3 * (16 + 4)


def test_an_embedding_that_is_only_looked_up_does_not_count(tiny_models: dict[str, Path], make_learner) -> None:
    tied, untied = (model_cost(make_learner(tiny_models[name]).model) for name in ("tied", "untied"))
    assert tied == untied


def test_memory_of_the_process_is_measured() -> None:
    assert 0.01 < peak_memory_gib(torch.device("cpu")) < 1000
