"""Compare one step with a float64 oracle that sees one sample at a time."""

from pathlib import Path

import numpy as np
import pytest
import torch

from trivet.config.schema.losses import DefaultLossConfig
from trivet.errors import BatchError, Diverged
from trivet.trainer.ranks.world import gather_tensor
from trivet.trainer.rows import to_tensors
from trivet.trainer.step import train_step

TOLERANCE = 1e-6
"""Relative tolerance in float32 (invariant 8)."""

PARAMETER_TOLERANCE = 5e-6
"""A query projection's gradient is a small difference of large numbers, so float32 alone costs it 1.2e-6 here."""

LOSSES = {
    "token": DefaultLossConfig(kl_tau=0.1),
    "sequence": DefaultLossConfig(ratio_type="sequence", kl_tau=0.1, adv_tau=0.7),
    "cross-entropy": None,
}


def full_gradients(model) -> dict[str, torch.Tensor]:
    return {name.removeprefix("causal_lm."): gather_tensor(parameter.grad) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("prompt_length", [0, 20], ids=["nothing-shared", "shared-prompts"])
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradients_equal_the_oracle_in_every_layout(
    any_model: Path, make_learner, oracle, loss: str, prompt_length: int
) -> None:
    examples = oracle.make_examples(count=9, vocab_size=100, prompt_length=prompt_length)
    expected_loss, expected = oracle.loss_and_gradients(any_model, examples, LOSSES[loss])
    learner = make_learner(any_model, loss=LOSSES[loss])
    for name, rows in oracle.layouts(examples).items():
        result = train_step(learner, rows, step=1)
        assert (result.num_computed_tokens < sum(row.num_tokens for row in rows)) == (prompt_length > 0), name
        assert result.loss == pytest.approx(expected_loss, rel=TOLERANCE), name
        gradients = full_gradients(learner.model)
        assert oracle.gradient_error(gradients, expected) < TOLERANCE, name
        assert oracle.largest_parameter_error(gradients, expected) < PARAMETER_TOLERANCE, name


@pytest.mark.parametrize("max_tokens", [1, 30, 1000])
def test_loss_and_gradients_equal_the_oracle_when_rows_are_packed_anew(
    tiny_model: Path, make_learner, oracle, max_tokens: int
) -> None:
    """The samples lie in a row each, in some rows, or in one."""
    examples = oracle.make_examples(count=9, vocab_size=100)
    expected_loss, expected = oracle.loss_and_gradients(tiny_model, examples, LOSSES["token"])
    learner = make_learner(tiny_model, loss=LOSSES["token"])
    learner.micro_batch_tokens = max_tokens
    result = train_step(learner, oracle.layouts(examples)["uneven rows"], step=1)
    assert result.loss == pytest.approx(expected_loss, rel=TOLERANCE)
    assert oracle.gradient_error(full_gradients(learner.model), expected) < TOLERANCE


def test_a_long_prompt_is_computed_once_though_each_row_has_place_for_one_sample_alone(
    tiny_model: Path, make_learner, oracle
) -> None:
    prompt, answer = list(range(60)), 5
    rows = [
        oracle.make_row(
            [
                oracle.Example(
                    token_ids=[*prompt, *[60 + number] * answer],
                    is_trained=[False] * len(prompt) + [True] * answer,
                    sampler_logprobs=[-1.0] * (len(prompt) + answer),
                    advantage=1.0,
                    temperature=1.0,
                )
            ]
        )
        for number in range(8)
    ]
    result = train_step(make_learner(tiny_model), rows, step=1)
    assert result.num_computed_tokens == len(prompt) + 8 * answer


def test_mean_of_the_loss_values_is_the_loss_of_the_step(tiny_model: Path, make_learner, oracle) -> None:
    rows = oracle.layouts(oracle.make_examples(count=6, vocab_size=100))["uneven rows"]
    for loss in LOSSES.values():
        result = train_step(make_learner(tiny_model, loss=loss), rows, step=1)
        assert result.values["loss"].mean() == pytest.approx(result.loss, rel=1e-5)


def test_gradient_norm_is_reported_before_clipping_and_clipped_to_the_limit(tiny_model: Path, make_learner, oracle) -> None:
    rows = [oracle.make_row(oracle.make_examples(count=4, vocab_size=100))]
    learner = make_learner(tiny_model, loss=DefaultLossConfig(), max_norm=1e-3)
    result = train_step(learner, rows, step=1)
    assert result.grad_norm > 1e-2
    clipped = torch.stack([gradient.norm() for gradient in full_gradients(learner.model).values()]).norm()
    assert float(clipped) == pytest.approx(1e-3, rel=1e-4)


def test_bf16_compute_is_close_to_float32(tiny_model: Path, make_learner, oracle) -> None:
    rows = [oracle.make_row(oracle.make_examples(count=6, vocab_size=100))]
    wide = train_step(make_learner(tiny_model), rows, step=1)
    narrow = train_step(make_learner(tiny_model, compute_dtype="bfloat16"), rows, step=1)
    assert narrow.loss == pytest.approx(wide.loss, rel=5e-3)
    assert narrow.grad_norm == pytest.approx(wide.grad_norm, rel=5e-2)


def test_rows_without_loss_tokens_change_nothing(tiny_model: Path, make_learner, oracle) -> None:
    row = oracle.make_row(oracle.make_examples(count=3, vocab_size=100))
    empty = oracle.make_row(oracle.make_examples(count=2, vocab_size=100, seed=5))
    empty.loss_mask_T = np.zeros_like(empty.loss_mask_T)
    learner = make_learner(tiny_model, loss=DefaultLossConfig())
    assert train_step(learner, [empty, row], step=1).loss == train_step(learner, [row], step=1).loss


def test_a_batch_without_loss_tokens_is_refused(tiny_model: Path, make_learner, oracle) -> None:
    row = oracle.make_row(oracle.make_examples(count=1, vocab_size=100))
    row.loss_mask_T = np.zeros_like(row.loss_mask_T)
    with pytest.raises(BatchError, match="batch 7 has 1 rows and no token to train on"):
        train_step(make_learner(tiny_model, loss=DefaultLossConfig()), [row], step=7)


def test_a_loss_that_is_not_a_number_stops_the_run_and_leaves_the_weights(tiny_model: Path, make_learner, oracle) -> None:
    row = oracle.make_row(oracle.make_examples(count=2, vocab_size=100))
    row.advantages_T = np.full_like(row.advantages_T, np.nan)
    learner = make_learner(tiny_model, loss=DefaultLossConfig(token_mask_high=1e9, geo_mask_high=1e9), lr=1.0)
    before = [parameter.detach().clone() for parameter in learner.model.parameters()]
    with pytest.raises(Diverged, match="the loss of step 3 is nan"):
        train_step(learner, [row], step=3)
    assert all(torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True))


def test_in_bf16_the_next_forward_uses_the_weights_of_the_update(any_model: Path, make_learner, oracle) -> None:
    """Casts of master weights are kept between forwards, and must not outlive an update."""
    rows = oracle.layouts(oracle.make_examples(count=5, vocab_size=100))["one row"]
    learner = make_learner(any_model, lr=1e-2, compute_dtype="bfloat16")
    for _ in range(2):
        train_step(learner, rows, step=1)
    fresh = make_learner(any_model, compute_dtype="bfloat16")
    with torch.no_grad():
        for ours, theirs in zip(fresh.model.parameters(), learner.model.parameters(), strict=True):
            ours.copy_(theirs)
        row = to_tensors(rows[0], device=torch.device("cpu"))
        assert torch.equal(learner.model(row).logprobs_N, fresh.model(row).logprobs_N)
