"""The run-length encoding of policy versions."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.wire.versions import VersionRun, count_tokens, encode_versions, join_versions, newest_version, oldest_version

versions = st.lists(st.integers(0, 5), max_size=40)


def expand(runs):
    return [run.version for run in runs for _ in range(run.length)]


@given(versions)
def test_encoding_keeps_every_tokens_version_in_the_fewest_runs(per_token):
    runs = encode_versions(per_token)
    assert expand(runs) == per_token
    assert count_tokens(runs) == len(per_token)
    assert all(left.version != right.version for left, right in itertools.pairwise(runs))


@given(st.lists(versions, max_size=5))
def test_joining_is_encoding_the_concatenation(parts):
    assert join_versions(map(encode_versions, parts)) == encode_versions(version for part in parts for version in part)


def test_empty_runs_vanish_when_joined():
    assert join_versions([[VersionRun(1, 0)], [VersionRun(2, 3), VersionRun(1, 0)], [VersionRun(2, 1)]]) == [VersionRun(2, 4)]


def test_oldest_and_newest_span_the_runs():
    runs = encode_versions([3, 3, 2, 4])
    assert oldest_version(runs) == 2
    assert newest_version(runs) == 4


@pytest.mark.parametrize("function", [oldest_version, newest_version])
def test_nothing_sampled_has_no_version(function):
    with pytest.raises(ValueError, match="empty"):
        function([])
