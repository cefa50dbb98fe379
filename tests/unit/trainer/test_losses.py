"""Test masks, clips and metrics of the policy loss on chosen ratios. test_step.py compares the whole with an oracle."""

import math

import pytest
import torch

from trivet.config.schema.losses import DefaultLossConfig
from trivet.trainer.attention.packed import Segments
from trivet.trainer.device_copies import read_values
from trivet.trainer.losses.formulas import default_loss
from trivet.trainer.losses.terms import mismatch_kl
from trivet.trainer.model.logprobs import TokenScores
from trivet.trainer.rows import RowTensors

CPU = torch.device("cpu")
TRAINER_LOGPROB = -1.0


def score(ratios: list[list[float]], *, advantages: list[float] | None = None, **config: float | str):
    """Return the loss of samples with the given ratios, the same trainer log-probability and advantage 1."""
    flat = torch.tensor([ratio for sample in ratios for ratio in sample])
    counts = torch.tensor([len(sample) for sample in ratios])
    index = torch.zeros(len(flat), dtype=torch.int64)
    logprobs_N = torch.full((len(flat),), TRAINER_LOGPROB, requires_grad=True)
    row = RowTensors(
        token_ids_1U=index[None],
        position_ids_1U=index[None],
        segments=Segments.from_samples([len(flat)], device=CPU),
        predictors_N=index,
        targets_N=index,
        temperatures_N=torch.ones(len(flat)),
        sampler_logprobs_N=TRAINER_LOGPROB - flat.log(),
        advantages_N=torch.tensor(advantages or [1.0] * len(ratios)).repeat_interleave(counts),
        samples_N=torch.arange(len(ratios)).repeat_interleave(counts),
        num_samples=len(ratios),
        num_loss_tokens_S=tuple(counts.tolist()),
    )
    loss = default_loss(TokenScores(logprobs_N, torch.zeros(len(flat))), row, config=DefaultLossConfig.model_validate(config))
    torch.stack(list(loss.terms.values())).sum().backward()
    assert logprobs_N.grad is not None
    return loss, (-logprobs_N.grad).tolist()


def test_tokens_outside_the_mask_carry_no_gradient() -> None:
    loss, coefficients = score([[1.0, 0.1, 9.0, 1.0, 1.0, 1.0]])
    assert coefficients == pytest.approx([1.0, 0.0, 0.0, 1.0, 1.0, 1.0])
    assert loss.values["is_masked"].tolist() == [False, True, True, False, False, False]
    assert loss.values["is_masked_low"].tolist() == [False, True, False, False, False, False]
    assert loss.values["is_masked_high"].tolist() == [False, False, True, False, False, False]


def test_a_sample_whose_geometric_mean_is_out_of_range_is_masked_whole() -> None:
    loss, coefficients = score([[1.0, 0.5], [1.0, 1.0]], geo_mask_low=0.9)
    assert coefficients == pytest.approx([0.0, 0.0, 1.0, 1.0])
    assert loss.values["geo_masked_low"].tolist() == [True, False]
    assert loss.values["geo_seq_ratio"].tolist() == pytest.approx([math.sqrt(0.5), 1.0])


def test_one_extreme_token_masks_its_sample() -> None:
    loss, coefficients = score([[1.0, 1.0, 1.0, 200.0], [1.0]])
    assert coefficients == pytest.approx([0.0, 0.0, 0.0, 0.0, 1.0])
    assert loss.values["sequence_masked_high"].tolist() == [True, False]
    loss, coefficients = score([[1.0, 0.3], [1.0]], sequence_mask_low=0.4)
    assert coefficients == pytest.approx([0.0, 0.0, 1.0])
    assert loss.values["sequence_masked_low"].tolist() == [True, False]


def test_an_overflowing_ratio_is_masked_and_stays_finite() -> None:
    loss, coefficients = score([[1e30 * 1e8, 1.0, 1.0]], sequence_mask_high=1e38)
    assert all(math.isfinite(term.item()) for term in loss.terms.values())
    assert coefficients[0] == 0.0


def test_mismatch_kl_is_zero_for_equal_policies_and_never_negative() -> None:
    log_ratios = torch.tensor([0.0, 1e-4, -1e-4, 0.5, -0.5], dtype=torch.float32)
    found = mismatch_kl(log_ratios)
    exact = torch.expm1(log_ratios.double()) - log_ratios.double()
    assert found[0] == 0.0
    assert (found >= 0).all()
    torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=1e-11)


def test_mismatch_is_split_into_masked_and_unmasked_tokens() -> None:
    loss, _ = score([[1.0, 9.0, 2.0]])
    values = read_values([loss.values])
    assert values["masked_mismatch_kl"].tolist() == pytest.approx([9 - math.log(9) - 1], rel=1e-5)
    assert values["unmasked_mismatch_kl"].tolist() == pytest.approx([0.0, 2 - math.log(2) - 1], rel=1e-4, abs=1e-6)
