from pathlib import Path

import numpy as np
import pytest
import torch

from trivet.errors import TrivetError
from trivet.trainer.rows import to_tensors
from trivet.trainer.self_check import measure_mismatch, require_agreement


def agreeing_row(model, oracle):
    packed = oracle.make_row(oracle.make_examples(count=4, vocab_size=100))
    with torch.no_grad():
        scores = model(to_tensors(packed, device=torch.device("cpu")))
    packed.logprobs_T[packed.loss_mask_T] = scores.logprobs_N.numpy()
    return packed


def test_the_trainers_own_log_probabilities_do_not_mismatch(tiny_model: Path, make_learner, oracle, world) -> None:
    model = make_learner(tiny_model).model
    mismatch = measure_mismatch(model, [agreeing_row(model, oracle)], world)
    assert mismatch == pytest.approx(0.0, abs=1e-10)


def test_mismatch_is_the_mean_over_loss_tokens(tiny_model: Path, make_learner, oracle, world) -> None:
    model = make_learner(tiny_model).model
    row = agreeing_row(model, oracle)
    row.logprobs_T -= np.float32(0.5)
    assert measure_mismatch(model, [row, row], world) == pytest.approx(np.expm1(0.5) - 0.5, rel=1e-4)


def test_an_empty_self_check_measures_nothing(tiny_model: Path, make_learner, world) -> None:
    assert measure_mismatch(make_learner(tiny_model).model, [], world) is None


@pytest.mark.parametrize("mismatch", [0.11, float("nan"), float("inf")])
def test_disagreement_stops_the_run_and_says_where_to_look(mismatch: float) -> None:
    with pytest.raises(TrivetError, match=r"trainer\.max_mismatch_kl = 0\.1.*compute_dtype.*temperature"):
        require_agreement(mismatch, limit=0.1)


def test_agreement_passes() -> None:
    require_agreement(0.1, limit=0.1)
