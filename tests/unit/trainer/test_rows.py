"""Who takes which row, and what of a row reaches the model."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trivet.trainer.rows import deal_rows, rows_of_rank, to_tensors

CPU = torch.device("cpu")


@given(st.lists(st.integers(1, 4096), max_size=40), st.integers(1, 9))
def test_every_row_is_dealt_once_and_ranks_differ_by_places_only(lengths: list[int], num_ranks: int) -> None:
    dealt = deal_rows(lengths, num_ranks=num_ranks)
    assert sorted(index for rows in dealt for index in rows) == list(range(len(lengths)))
    assert max(map(len, dealt)) == -(-len(lengths) // num_ranks)


def test_tokens_are_balanced_over_ranks() -> None:
    lengths = [100, 90, 80, 20, 15, 10]
    loads = [sum(lengths[index] for index in rows) for rows in deal_rows(lengths, num_ranks=3)]
    assert loads == [110, 105, 100]


def test_ranks_without_a_row_of_their_own_get_dummies(oracle) -> None:
    rows = [oracle.make_row([example]) for example in oracle.make_examples(count=4, vocab_size=50)]
    per_rank = [rows_of_rank(rows, rank=rank, num_ranks=3, device=CPU) for rank in range(3)]
    assert [len(mine) for mine in per_rank] == [2, 2, 2]
    assert sum(row.is_dummy for mine in per_rank for row in mine) == 2


def test_each_loss_token_is_predicted_from_the_token_before_it(oracle) -> None:
    examples = oracle.make_examples(count=3, vocab_size=50)
    packed = oracle.make_row(examples)
    row = to_tensors(packed, device=CPU)
    positions = np.flatnonzero(packed.loss_mask_T)
    assert row.predictors_N.tolist() == (positions - 1).tolist()
    assert row.targets_N.tolist() == packed.token_ids_T[positions].tolist()
    assert row.samples_N.tolist() == [s for s, example in enumerate(examples) for _ in range(sum(example.is_trained))]
    assert row.segments.lengths == tuple(len(example.token_ids) for example in examples)


def test_samples_without_loss_tokens_are_not_counted(oracle) -> None:
    packed = oracle.make_row(oracle.make_examples(count=3, vocab_size=50))
    first = int(packed.sequence_lengths_S[0])
    packed.loss_mask_T[:first] = False
    row = to_tensors(packed, device=CPU)
    assert row.num_samples == 2
    assert set(row.samples_N.tolist()) == {0, 1}


def test_a_trained_first_token_is_our_own_mistake(oracle) -> None:
    packed = oracle.make_row(oracle.make_examples(count=2, vocab_size=50))
    packed.loss_mask_T[packed.sequence_lengths_S[0]] = True
    with pytest.raises(AssertionError, match="first token of a sample"):
        to_tensors(packed, device=CPU)
