import numpy as np
import pytest
import torch

from trivet.trainer.rows import join_samples, plan_rows, to_tensors

CPU = torch.device("cpu")


def test_ranks_without_a_row_of_their_own_get_dummies(oracle) -> None:
    rows = [oracle.make_row([example]) for example in oracle.make_examples(count=4, vocab_size=50)]
    per_rank = [plan_rows(rows, num_ranks=3).take(rank, device=CPU) for rank in range(3)]
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


def test_samples_are_packed_anew_under_a_cap_and_know_where_they_came_from(oracle) -> None:
    examples = oracle.make_examples(count=8, vocab_size=50)
    rows = [oracle.make_row(examples[:5]), oracle.make_row(examples[5:])]
    longest = max(len(example.token_ids) for example in examples)
    packed = plan_rows(rows, num_ranks=1, max_tokens=longest).take(0, device=CPU)
    assert len(packed) > 2
    assert max(row.token_ids_1U.shape[1] for row in packed) == longest == packed[0].token_ids_1U.shape[1]
    places = [place for row in packed for place in row.sample_indices]
    assert sorted(places) == [(0, number) for number in range(5)] + [(1, number) for number in range(3)]
    for row in packed:
        parts = row.token_ids_1U[0].split(list(row.segments.lengths))
        assert [part.tolist() for part in parts] == [
            examples[5 * index + number].token_ids for index, number in row.sample_indices
        ]


@pytest.mark.parametrize(
    ("prompt", "answer", "size", "max_tokens", "computed"),
    [
        (40, 5, 8, 60, [80]),  # divided, each of two parts would repeat half of what it computes
        (16, 20, 16, 176, [176, 176]),  # divided, 352 tokens instead of 336
    ],
)
def test_a_group_exceeds_the_cap_where_its_prompt_is_long(oracle, prompt, answer, size, max_tokens, computed) -> None:
    group = [
        oracle.Example(
            token_ids=[*range(prompt), *([prompt + number] * answer)],
            is_trained=[False] * prompt + [True] * answer,
            sampler_logprobs=[-1.0] * (prompt + answer),
            advantage=1.0,
            temperature=1.0,
        )
        for number in range(size)
    ]
    plan = plan_rows([oracle.make_row(group)], num_ranks=1, max_tokens=max_tokens, max_shared_tokens=400)
    assert [row.num_tokens for row in plan.take(0, device=CPU)] == computed
    assert plan.num_tokens == sum(computed)


def test_a_row_is_divided_so_that_no_rank_waits_with_a_dummy(oracle) -> None:
    rows = [oracle.make_row(oracle.make_examples(count=6, vocab_size=50))]
    per_rank = [plan_rows(rows, num_ranks=2).take(rank, device=CPU) for rank in range(2)]
    assert [len(mine) for mine in per_rank] == [1, 1]
    assert not any(row.is_dummy for mine in per_rank for row in mine)
    assert sorted(place for mine in per_rank for row in mine for place in row.sample_indices) == [
        (0, number) for number in range(6)
    ]


def test_what_only_some_rows_carry_is_left_out_of_a_joined_row(oracle) -> None:
    rows = [oracle.make_row([example]) for example in oracle.make_examples(count=2, vocab_size=50)]
    rows[0].teacher_logprobs_T = np.zeros(rows[0].num_tokens, dtype=np.float32)
    assert join_samples(rows, [(1, 0), (0, 0)]).teacher_logprobs_T is None
    alone = join_samples(rows, [(0, 0)])
    assert alone.teacher_logprobs_T is not None
    assert alone.token_ids_T.tolist() == rows[0].token_ids_T.tolist()


def test_a_model_that_cannot_keep_samples_apart_gets_one_sample_a_row(oracle) -> None:
    examples = oracle.make_examples(count=6, vocab_size=50, prompt_length=20)
    packed = oracle.make_row(examples)
    packed.loss_mask_T[: len(examples[0].token_ids)] = False
    plan = plan_rows([packed], num_ranks=1, max_tokens=100, max_shared_tokens=100, packs=False)
    rows = plan.take(0, device=CPU)
    assert sorted(row.sample_indices for row in rows) == [((0, number),) for number in range(1, 6)]
    assert plan.num_tokens == sum(len(example.token_ids) for example in examples[1:])
