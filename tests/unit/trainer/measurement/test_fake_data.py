import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.trainer.measurement.fake_data import fake_groups, fake_item, fake_rows


@given(st.integers(2, 40), st.sampled_from(["fixed", "variable"]), st.integers(1, 3), st.integers(1, 3))
def test_rows_are_full_and_as_many_as_the_ranks_need(seq_len: int, length, num_ranks: int, rows_per_rank: int) -> None:
    rows = fake_rows(1, seed=0, seq_len=seq_len, vocab_size=7, num_ranks=num_ranks, rows_per_rank=rows_per_rank, length=length)
    assert [row.num_tokens for row in rows] == [seq_len] * (num_ranks * rows_per_rank)
    for row in rows:
        assert row.sequence_lengths_S.min() >= 2
        assert row.loss_mask_T.sum() == seq_len - len(row.sequence_lengths_S)
        assert 0 <= row.token_ids_T.min() <= row.token_ids_T.max() < 7


def test_a_row_is_one_sequence_and_a_rank_has_two_rows_unless_told_otherwise() -> None:
    rows = fake_rows(1, seed=0, seq_len=16, vocab_size=50)
    assert [row.sequence_lengths_S.tolist() for row in rows] == [[16], [16]]


def test_a_step_is_the_same_again_and_another_is_not() -> None:
    first, again, other = (fake_rows(step, seed=3, seq_len=16, vocab_size=1000) for step in (5, 5, 6))
    assert np.array_equal(first[1].token_ids_T, again[1].token_ids_T)
    assert not np.array_equal(first[1].token_ids_T, other[1].token_ids_T)
    assert not np.array_equal(first[0].token_ids_T, first[1].token_ids_T)


def test_samples_of_a_group_share_a_prompt_that_is_not_trained_on() -> None:
    rows = fake_groups(1, seed=0, seq_len=10, vocab_size=1000, num_rows=3, prompt_len=2, answer_len=3, group_size=3)
    samples_ST = np.stack([row.token_ids_T.reshape(2, 5) for row in rows]).reshape(6, 5)
    prompts = {tuple(sample_T[:2]) for sample_T in samples_ST}
    answers = {tuple(sample_T[2:]) for sample_T in samples_ST}
    assert (len(prompts), len(answers)) == (2, 6)
    for row in rows:
        assert row.loss_mask_T.reshape(2, 5).tolist() == [[False, False, True, True, True]] * 2


def test_without_prompts_a_sample_fills_a_row() -> None:
    groups = fake_groups(1, seed=3, seq_len=16, vocab_size=50, num_rows=2, prompt_len=0, answer_len=None, group_size=1)
    for found, expected in zip(groups, fake_rows(1, seed=3, seq_len=16, vocab_size=50), strict=True):
        assert np.array_equal(found.token_ids_T, expected.token_ids_T)
        assert np.array_equal(found.loss_mask_T, expected.loss_mask_T)


def test_increasing_ids_count_up_within_the_vocabulary() -> None:
    (row,) = fake_rows(1, seed=0, seq_len=6, vocab_size=4, rows_per_rank=1, token_ids="increasing")
    assert row.token_ids_T.tolist() == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize(("length", "expected"), [("fixed", {9}), ("variable", set(range(2, 10)))])
def test_items_have_the_lengths_asked_for(length, expected: set[int]) -> None:
    items = [fake_item(index, seed=0, seq_len=9, vocab_size=5, length=length) for index in range(200)]
    assert {item.sample.num_tokens for item in items} == expected
    assert all(item.sample.num_loss_tokens == item.sample.num_tokens - 1 for item in items)
