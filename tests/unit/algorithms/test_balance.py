from hypothesis import given
from hypothesis import strategies as st

from trivet.algorithms.balance import arrange, deal, divide, repack

LENGTHS = st.lists(st.integers(min_value=1, max_value=60), min_size=1, max_size=40)
RANKS = st.integers(min_value=1, max_value=6)


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
