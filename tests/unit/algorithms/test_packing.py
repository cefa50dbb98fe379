import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.algorithms.packing import PackItem, arrange, deal, divide, first_fit_decreasing, pack, repack, stack, truncate
from trivet.wire.rollouts import Sample, TurnRun
from trivet.wire.versions import VersionRun

LENGTHS = st.lists(st.integers(min_value=1, max_value=60), min_size=1, max_size=40)
RANKS = st.integers(min_value=1, max_value=6)


def make_sample(length, *, first=0, prompt=1, temperature=1.0):
    return Sample(
        token_ids_T=np.arange(first, first + length, dtype=np.int32),
        loss_mask_T=np.arange(length) >= prompt,
        logprobs_T=-np.arange(length, dtype=np.float32),
        teacher_logprobs_T=-0.5 * np.arange(length, dtype=np.float32),
        versions=[VersionRun(0, length - prompt)],
        temperature=temperature,
    )


@given(st.lists(st.integers(1, 20), max_size=60))
def test_every_item_lies_in_one_bin_and_none_overflows(lengths):
    bins = first_fit_decreasing(lengths, capacity=20)
    assert sorted(index for bin_ in bins for index in bin_) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in bin_) <= 20 for bin_ in bins)
    lower_bound = -(-sum(lengths) // 20)
    assert len(bins) <= max(2 * lower_bound, lower_bound + 1)


def test_longest_go_first_and_fill_the_first_gap():
    assert first_fit_decreasing([3, 7, 5, 5, 3], capacity=10) == [[1, 0], [2, 3], [4]]


def test_an_item_over_the_capacity_is_an_error():
    with pytest.raises(ValueError, match="11 tokens does not fit a row of 10"):
        first_fit_decreasing([11], capacity=10)


def test_a_sample_that_fits_is_not_touched_and_a_longer_one_is_cut():
    sample = make_sample(10)
    assert truncate(sample, seq_len=10) is sample
    cut = truncate(sample, seq_len=4)
    assert cut.num_tokens == len(cut.loss_mask_T) == len(cut.logprobs_T) == 4
    assert cut.is_truncated
    assert not sample.is_truncated


def test_a_cut_sample_keeps_the_turns_and_advantages_of_the_tokens_that_are_left():
    sample = make_sample(10)
    sample.turns, sample.agent = [TurnRun(0, 2), TurnRun(3, 4), TurnRun(4, 3)], "solver"
    sample.advantages_T = np.arange(10, dtype=np.float32)
    cut = truncate(sample, seq_len=5)
    assert (cut.turns, cut.agent) == ([TurnRun(0, 2), TurnRun(3, 2)], "solver")
    [row] = pack([PackItem(sample=sample, advantage=9.0), PackItem(sample=make_sample(3), advantage=0.1)], seq_len=5, row_len=8)
    assert row.advantages_T.dtype == np.float32
    np.testing.assert_array_equal(row.advantages_T, np.array([0, 1, 2, 3, 4, 0.1, 0.1, 0.1], dtype=np.float32))


@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=8))
def test_one_number_for_a_rollout_is_repeated_bit_for_bit(advantages):
    items = [PackItem(sample=make_sample(2 + index), advantage=each) for index, each in enumerate(advantages)]
    [row] = stack(items, seq_len=20, samples_per_row=8)
    expected = np.repeat(np.array(advantages[::-1], dtype=np.float32), row.sequence_lengths_S)
    assert row.advantages_T.tobytes() == expected.tobytes()


@given(st.lists(st.tuples(st.integers(2, 30), st.floats(-2, 2, width=32)), max_size=30))
def test_rows_carry_every_sample_unchanged(drawn):
    items = [
        PackItem(sample=make_sample(length, first=1000 * index, temperature=0.5 + index), advantage=advantage)
        for index, (length, advantage) in enumerate(drawn)
    ]
    seen = set()
    for row in pack(items, seq_len=24):
        assert row.num_tokens == row.sequence_lengths_S.sum() <= 24
        start = 0
        for length in row.sequence_lengths_S:
            part = slice(start, start + length)
            start += length
            index = int(row.token_ids_T[part][0]) // 1000
            expected = truncate(items[index].sample, seq_len=24)
            seen.add(index)
            np.testing.assert_array_equal(row.token_ids_T[part], expected.token_ids_T)
            np.testing.assert_array_equal(row.position_ids_T[part], np.arange(length))
            np.testing.assert_array_equal(row.loss_mask_T[part], expected.loss_mask_T)
            np.testing.assert_array_equal(row.logprobs_T[part], expected.logprobs_T)
            assert set(row.advantages_T[part]) == {np.float32(items[index].advantage)}
            assert set(row.temperatures_T[part]) == {np.float32(0.5 + index)}
    assert seen == set(range(len(items)))


def test_rows_have_the_dtypes_of_the_wire():
    (row,) = pack([PackItem(sample=make_sample(3), advantage=1.0)], seq_len=8)
    kinds = {name: getattr(row, name).dtype.str for name in type(row).__struct_fields__ if name != "experts_S"}
    assert kinds == {
        "token_ids_T": "<i4",
        "position_ids_T": "<i4",
        "loss_mask_T": "|b1",
        "logprobs_T": "<f4",
        "advantages_T": "<f4",
        "temperatures_T": "<f4",
        "sequence_lengths_S": "<i4",
        "teacher_logprobs_T": "<f4",
    }
    assert row.experts_S == []


def test_a_sample_without_loss_tokens_is_left_out_also_when_the_cut_took_them():
    items = [PackItem(sample=make_sample(4, prompt=4), advantage=1.0), PackItem(sample=make_sample(9, prompt=6), advantage=1.0)]
    assert pack(items, seq_len=6) == []
    assert pack([], seq_len=6) == []


def test_longer_rows_hold_several_rows_worth_of_cut_samples():
    items = [PackItem(sample=make_sample(length), advantage=0.0) for length in (10, 3, 3, 2)]
    rows = pack(items, seq_len=4, row_len=8)
    assert [row.sequence_lengths_S.tolist() for row in rows] == [[4, 3], [3, 2]]


def test_stacked_rows_hold_so_many_samples_of_alike_length():
    items = [PackItem(sample=make_sample(length), advantage=0.0) for length in (3, 9, 2, 8, 5)]
    rows = stack(items, seq_len=8, samples_per_row=2)
    assert [row.sequence_lengths_S.tolist() for row in rows] == [[8, 8], [5, 3], [2]]


def quadratic(lengths: list[int]) -> list[float]:
    return [length + 0.1 * length * length for length in lengths]


def pairs(count: int) -> list[list[int]]:
    return [list(range(start, min(start + 2, count))) for start in range(0, count, 2)]


@given(st.lists(st.floats(min_value=0.0, max_value=1e6), min_size=1, max_size=50), RANKS)
def test_sums_of_ranks_differ_by_the_largest_cost_at_most(costs: list[float], num_ranks: int) -> None:
    dealt = deal(costs, num_ranks=num_ranks)
    assert sorted(index for places in dealt for index in places) == list(range(len(costs)))
    sums = [sum(costs[index] for index in places) for places in dealt]
    assert max(sums) - min(sums) <= max(costs) * (1 + 1e-9)
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


@given(st.lists(st.integers(min_value=10, max_value=20), min_size=1, max_size=10), RANKS)
def test_full_rounds_leave_no_more_than_the_spread_of_costs(costs: list[int], num_ranks: int) -> None:
    costs = costs * num_ranks
    sums = [sum(costs[index] for index in places) for places in deal(costs, num_ranks=num_ranks)]
    assert max(sums) - min(sums) <= max(costs) - min(costs)


@given(LENGTHS, RANKS, st.none() | st.integers(min_value=1, max_value=80))
def test_every_sample_is_in_one_row_and_no_row_is_over_the_cap(
    lengths: list[int], num_ranks: int, max_tokens: int | None
) -> None:
    dealt = arrange(pairs(len(lengths)), lengths, costs=quadratic(lengths), num_ranks=num_ranks, max_tokens=max_tokens)
    rows = [row for rank in dealt for row in rank]
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    if max_tokens is not None:
        assert all(len(row) == 1 or sum(lengths[index] for index in row) <= max_tokens for row in rows)
    for rank in dealt:
        tokens = [sum(lengths[index] for index in row) for row in rank]
        assert tokens == sorted(tokens, reverse=True)


@given(LENGTHS, RANKS)
def test_ranks_have_equally_many_rows_unless_every_row_is_a_single_sample(lengths: list[int], num_ranks: int) -> None:
    dealt = arrange(pairs(len(lengths)), lengths, costs=quadratic(lengths), num_ranks=num_ranks)
    counts = {len(rank) for rank in dealt}
    assert len(counts) == 1 or all(len(row) == 1 for rank in dealt for row in rank)


def test_the_most_costly_row_is_divided_to_fill_the_last_places() -> None:
    lengths = [5, 4, 3, 2, 1]
    assert divide([[0, 1, 2], [3, 4]], lengths, multiple_of=3, costs=lengths) == [[3, 4], [0], [1, 2]]


def test_a_sample_longer_than_the_cap_is_alone() -> None:
    assert repack([9, 2, 3, 4], max_tokens=5) == [[0], [3], [2, 1]]


def test_rows_of_one_rank_stay_as_they_came() -> None:
    assert arrange([[0], [1, 2]], [3, 9, 1], costs=quadratic([3, 9, 1]), num_ranks=1) == [[[1, 2], [0]]]
