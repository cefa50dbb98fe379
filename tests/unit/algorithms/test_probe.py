import re

import pytest

from trivet.algorithms.probe import MAX_MEAN_DIFFERENCE, Probe, ProbeSample, compare, convert_dtype, cut_samples
from trivet.errors import WeightsError

PROBE = Probe(dtype="float32", samples=[ProbeSample([1, 2, 3], [-1.0, -2.0]), ProbeSample([7, 8], [-0.5])])
SAME = [[-1.0, -2.0], [-0.5]]


def test_equal_log_probabilities_agree() -> None:
    assert compare(PROBE, SAME, dtype="float32", where="policy 3").mismatch == 0


def test_the_limit_is_that_of_the_less_precise_side() -> None:
    found = [[-1.01, -2.01], [-0.51]]
    assert compare(PROBE, found, dtype="bfloat16", where="policy 3").limit == MAX_MEAN_DIFFERENCE["bfloat16"]
    with pytest.raises(WeightsError, match=r"differ by 0\.01 nats on average"):
        compare(PROBE, found, dtype="float32", where="policy 3")


def test_the_tokens_that_differ_most_are_named() -> None:
    with pytest.raises(WeightsError, match=re.escape("(token 8 at position 1 of sample 1: trainer -0.5, server -9; token 3")):
        compare(PROBE, [[-1.0, -3.0], [-9.0]], dtype="bfloat16", where="policy 3 as this server computes it")


def test_one_token_far_off_is_found_among_many_that_agree() -> None:
    probe = Probe(dtype="float32", samples=[ProbeSample(list(range(129)), [-1.0] * 128)])
    with pytest.raises(WeightsError, match="token 128 at position 128 of sample 0"):
        compare(probe, [[-1.0] * 127 + [-1.5]], dtype="float32", where="policy 3")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_no_number_never_agrees(value: float) -> None:
    with pytest.raises(WeightsError, match="token 2 at position 1 of sample 0"):
        compare(PROBE, [[value, -2.0], [-0.5]], dtype="bfloat16", where="policy 3")


def test_a_server_that_leaves_tokens_out_is_refused() -> None:
    with pytest.raises(WeightsError, match="scored 2 of the 3 tokens"):
        compare(PROBE, [[-1.0], [-0.5]], dtype="float32", where="policy 3")


def test_a_dtype_without_a_limit_is_refused() -> None:
    with pytest.raises(WeightsError, match="float64"):
        convert_dtype("float64")


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [([30] * 8, [30, 30, 4]), ([100, 100], [32, 32]), ([1, 20, 50], [20, 32]), ([63, 63], [32, 32]), ([], [])],
)
def test_a_probe_has_at_most_as_many_tokens_as_asked_for(lengths: list[int], expected: list[int]) -> None:
    conversations = [list(range(length)) for length in lengths]
    samples = cut_samples(conversations, num_tokens=64)
    assert [len(sample) for sample in samples] == expected
    assert all(sample[0] == 0 for sample in samples), "a text begins with its first token"
    assert sum(map(len, samples)) <= 64
